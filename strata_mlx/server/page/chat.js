// The conversation: what was said is sent, and the answer is shown as it comes.

import { events, request } from "./api.js";
import { find, make, write } from "./dom.js";
import { bytes, count, number, percent, plural, seconds } from "./format.js";
import { show } from "./prose.js";

const EXAMPLES = ["class Stack:", "def fibonacci(n):", "Why is the sky blue?"];

const log = find("log");
const message = find("message");
const said = []; // of this chat: {role, content}
let model = null;
let running = null; // the AbortController of the answer that is coming

const atEnd = () => log.scrollHeight - log.scrollTop - log.clientHeight < 60;

// Adds to the log and keeps its end in view, unless the reader has scrolled up.
const grow = (change) => {
  const follow = atEnd();
  change();
  if (follow) log.scrollTop = log.scrollHeight;
};

const theModel = async () => {
  model ??= (await (await request("v1/models")).json()).data[0].id;
  write(find("model"), model);
  return model;
};

const value = (id) => (find(id).value.trim() === "" ? undefined : Number(find(id).value));

const body = async () => {
  const system = find("system").value.trim();
  return JSON.stringify({
    model: await theModel(),
    messages: [...(system ? [{ role: "system", content: system }] : []), ...said],
    temperature: value("temperature"),
    max_tokens: value("max-tokens"),
    seed: value("seed"),
    stream: true,
    stream_options: { include_usage: true },
  });
};

const facts = (usage, strata, times) => {
  const details = usage.completion_tokens_details ?? {};
  const drafted = strata?.drafted ?? 0;
  const accepted = strata?.accepted ?? details.accepted_prediction_tokens ?? 0;
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const decoding = times.end - times.first;
  return [
    plural(usage.completion_tokens, "token"),
    usage.completion_tokens > 1 && decoding > 0.02 && `${number((usage.completion_tokens - 1) / decoding)} tokens/s`,
    `first after ${seconds(times.first - times.start)}`,
    `prompt ${count(usage.prompt_tokens)}${cached ? `, ${count(cached)} cached` : ""}`,
    drafted && `${percent(accepted / drafted, 0)} of ${plural(drafted, "draft")} accepted`,
    strata?.misses != null && `${plural(strata.misses, "expert")} read, ${bytes(strata.bytes_read)}`,
    strata?.mode && `${strata.mode} routing`,
  ].filter(Boolean);
};

const now = () => performance.now() / 1000;

// Reads the answer into ``entry``. Returns its text.
const receive = async (response, entry, times) => {
  let text = "";
  let thought = "";
  let usage = null;
  let strata = null;
  let reason = null;
  let drawing = false;
  const draw = () => {
    drawing = false;
    grow(() => show(entry.text, text));
  };
  try {
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      strata = event.strata ?? event.usage?.strata ?? strata;
      const choice = event.choices?.[0];
      reason = choice?.finish_reason ?? reason;
      const delta = choice?.delta ?? {};
      const thinking = delta.reasoning_content ?? delta.reasoning;
      if (thinking) {
        thought += thinking;
        entry.thought.hidden = false;
        grow(() => write(entry.thought, thought));
      }
      if (delta.content) text += delta.content;
      if ((thinking || delta.content) && times.first === null) times.first = now();
      if (delta.content && !drawing) {
        drawing = true;
        requestAnimationFrame(draw);
      }
    }
  } finally {
    times.end = now();
    times.first ??= times.end;
    grow(() => show(entry.text, text));
    entry.said = text;
  }
  entry.complete = true;
  if (usage) grow(() => entry.facts.append(...facts(usage, strata, times).map((fact) => make("span", {}, fact))));
  if (reason === "length") entry.facts.append(make("span", {}, "ended by its limit of tokens"));
  return usage;
};

const newEntry = () => {
  const entry = {
    element: make("div", { class: "answer", "aria-busy": "true" }),
    thought: make("div", { class: "thought", hidden: "" }),
    text: make("div", { class: "text" }),
    facts: make("p", { class: "facts" }),
    said: "",
    complete: false,
  };
  entry.element.append(make("span", { class: "unseen" }, "Answer: "), entry.thought, entry.text, entry.facts);
  return entry;
};

const busy = (is) => {
  find("send").hidden = is;
  find("stop").hidden = !is;
  find("new").hidden = is || !said.length;
  find("composer-hint").hidden = is || said.length > 0;
  log.setAttribute("aria-busy", String(is));
};

const answer = async () => {
  const entry = newEntry();
  const times = { start: now(), first: null, end: null };
  grow(() => log.append(entry.element));
  running = new AbortController();
  busy(true);
  write(find("announcement"), "The answer is coming.");
  try {
    const headers = { "Content-Type": "application/json" };
    const options = { method: "POST", headers, body: await body(), signal: running.signal };
    const usage = await receive(await request("v1/chat/completions", options), entry, times);
    write(find("announcement"), `The answer is complete${usage ? `, ${plural(usage.completion_tokens, "token")}` : ""}.`);
  } catch (error) {
    const stopped = error.name === "AbortError";
    const why = stopped ? make("p", { class: "facts" }, "Stopped.") : make("p", { class: "error", role: "alert" }, error.message);
    grow(() => entry.element.append(why));
    if (stopped) write(find("announcement"), "Stopped.");
  } finally {
    entry.element.setAttribute("aria-busy", "false");
    if (entry.said || entry.complete) said.push({ role: "assistant", content: entry.said });
    else {
      const { content } = said.pop(); // it is not part of what follows, and can be sent again
      message.value ||= content;
    }
    running = null;
    busy(false);
    message.focus();
  }
};

const submit = () => {
  const text = message.value.trim();
  if (!text || running || !find("composer").reportValidity()) return;
  find("welcome").hidden = true;
  message.value = "";
  said.push({ role: "user", content: text });
  log.append(make("div", { class: "said" }, make("span", { class: "unseen" }, "You: "), text));
  log.scrollTop = log.scrollHeight;
  answer();
};

const begin = () => {
  said.length = 0;
  log.replaceChildren(find("welcome"));
  find("welcome").hidden = false;
  busy(false);
  message.focus();
};

export const startChat = () => {
  theModel().catch(() => {}); // it is asked for again when it is needed, and then the error is shown
  find("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  message.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit();
  });
  find("stop").addEventListener("click", () => running?.abort());
  find("new").addEventListener("click", begin);
  addEventListener("hashchange", () => {
    log.scrollTop = log.scrollHeight; // on a phone, the log could not follow while the engine was looked at
  });
  for (const text of EXAMPLES) {
    const button = make("button", { type: "button" }, text);
    button.addEventListener("click", () => {
      message.value = text;
      message.focus();
    });
    find("examples").append(button);
  }
};
