// The live view: each state that /v1/engine sends, in words, bars and lines.

import { events, request } from "./api.js";
import { find, make, terms, write } from "./dom.js";
import { bytes, bytesApart, count, number, percent, plural, seconds } from "./format.js";
import { showMap, startMap } from "./map.js";
import { Recent, SHOWN } from "./recent.js";

const PARTS = [
  ["verify", "decoding alone"],
  ["batch", "decoding together"],
  ["prompt", "reading prompts"],
  ["draft", "drafting"],
  ["commit", "keeping caches"],
];
const PHASES = { queued: "waiting", prompt: "reading the prompt", decoding: "decoding" };
const RETRY = [1, 2, 5, 10]; // seconds between attempts to connect

const recent = new Recent();
let lastSpeed = null; // tokens per second, of when there was work

const serving = (state) => state.requests.filter((each) => each.phase !== "queued");

const showStatus = (state) => {
  const running = serving(state).length;
  find("status").dataset.state = !state.alive ? "failed" : running ? "busy" : "idle";
  const speed = running && recent.speed ? `${number(recent.speed)} tokens/s` : "Working";
  write(find("status-text"), !state.alive ? `Stopped: ${state.trouble}` : running ? speed : "Idle");
};

const showSpeed = (state) => {
  const busy = serving(state).length > 0;
  if (recent.speed > 0 && busy) lastSpeed = recent.speed;
  write(find("speed"), lastSpeed === null ? "–" : number(lastSpeed));
  find("speed").parentElement.classList.toggle("still", !busy);
  const speeds = recent.speeds;
  const most = Math.max(...speeds.map(([, speed]) => speed), 0);
  const high = most || 1;
  const points = speeds.map(([ago, speed]) => `${(240 * (1 - ago / SHOWN)).toFixed(1)} ${(43 - 41 * (speed / high)).toFixed(1)}`);
  const line = `M${points.join("L")}`;
  find("sparkline").querySelector(".line").setAttribute("d", line);
  find("sparkline").querySelector(".area").setAttribute("d", `${line}V44H${points[0].split(" ")[0]}Z`);
  const windows = recent.sum((each) => each.totals.windows);
  const tokens = recent.sum((each) => each.totals.completion_tokens);
  terms(find("speed-facts"), [
    [`most in ${SHOWN} s`, number(most)],
    ["tokens per window", windows ? (tokens / windows).toFixed(2) : "–"],
  ]);
  write(find("sparkline-alt"), `Tokens per second in the last ${SHOWN} s: at most ${number(most)}, now ${number(recent.speed)}`);
};

// A bar of parts, and what they are. parts: [label, amount, number of its colour, amount in words].
const stack = (id, parts, all) => {
  const coloured = (place) => {
    const element = make("i");
    element.style.background = `var(--part-${place})`;
    return element;
  };
  const pieces = parts.map(([, amount, place]) => {
    const piece = coloured(place);
    piece.style.width = `${(100 * amount) / all}%`;
    return piece;
  });
  find(`${id}-bar`).replaceChildren(...pieces);
  const rows = parts.map(([label, amount, place, words]) => [
    make("dt", {}, coloured(place), label),
    make("dd", {}, words),
    make("dd", {}, percent(amount / all, 0)),
  ]);
  find(id).replaceChildren(...rows.flat());
};

const fill = (id, share) => {
  find(id).firstElementChild.style.width = `${(100 * Math.min(share, 1)).toFixed(2)}%`;
};

const showHits = (state) => {
  const { traffic } = state.experts;
  const hits = traffic ? recent.sum((each) => each.experts.traffic.hits) : 1;
  const misses = traffic ? recent.sum((each) => each.experts.traffic.misses) : 0;
  const known = hits + misses > 0;
  const share = known ? hits / (hits + misses) : 0;
  write(find("hit-rate"), known ? (100 * share).toFixed(traffic ? 1 : 0) : "–");
  fill("hit-meter", share);
  if (!traffic) {
    terms(find("hits"), [["all experts are in memory", ""], ["read from disk", "nothing"]]);
    return;
  }
  const reading = serving(state).length ? recent.rate((each) => each.experts.traffic.bytes) : 0;
  terms(find("hits"), [
    ["hits", count(traffic.hits)],
    ["misses", count(traffic.misses)],
    ["read from disk", bytes(traffic.bytes)],
    ["reading now", `${bytes(reading)}/s`],
  ]);
};

const showMemory = ({ memory }) => {
  const [amount, unit] = bytesApart(memory.used);
  write(find("memory"), amount);
  const budget = memory.budget === null ? "" : ` of ${bytes(memory.budget)}`;
  write(find("memory-unit"), `${unit}${budget}`);
  find("memory-meter").hidden = memory.budget === null;
  fill("memory-meter", memory.budget === null ? 0 : memory.used / memory.budget);
  write(find("memory-title"), memory.scope[0].toUpperCase() + memory.scope.slice(1));
  terms(find("memory-facts"), [
    ["budget left", memory.budget === null ? null : bytes(Math.max(0, memory.budget - memory.used))],
    ["prefix cache", bytes(memory.prefixes)],
    ["its limit", bytes(memory.prefix_budget)],
  ]);
};

const BUDGET_PARTS = 5; // that have a colour of their own

const showBudget = ({ memory }) => {
  const parts = Object.entries(memory.parts).filter(([, size]) => size > 0).sort((a, b) => b[1] - a[1]);
  const rest = parts.splice(BUDGET_PARTS).reduce((sum, [, size]) => sum + size, 0);
  const shown = [...parts, ...(rest ? [["other", rest]] : [])];
  const spent = shown.reduce((sum, [, size]) => sum + size, 0);
  stack("budget", shown.map(([name, size], i) => [name.replaceAll("_", " "), size, i + 1, bytes(size)]), Math.max(spent, memory.budget ?? 0));
  find("budget-bar").hidden = !shown.length;
  find("budget-none").hidden = shown.length > 0;
  write(find("budget-note"), memory.budget === null ? "none" : `${bytes(spent)} of ${bytes(memory.budget)} reserved`);
};

const showDrafts = (state) => {
  const places = state.totals.verified
    .map((_, place) => [
      recent.sum((each) => each.totals.verified[place]),
      recent.sum((each) => each.totals.accepted[place]),
    ])
    .filter(([verified]) => verified > 0);
  const bars = places.flatMap(([verified, accepted], place) => {
    const meter = make("div", { class: "meter" }, make("i"));
    meter.firstChild.style.width = `${((100 * accepted) / verified).toFixed(1)}%`;
    return [make("span", {}, `draft ${place + 1}`), meter, make("span", {}, `${percent(accepted / verified, 0)} of ${count(verified)}`)];
  });
  const none = state.drafting === "off" ? "Drafting is off." : "Nothing was drafted yet. A request drafts while it is the only one.";
  find("drafts").replaceChildren(...(bars.length ? bars : [make("p", { class: "note words" }, none)]));
  const drafted = recent.sum((each) => each.totals.drafted);
  const accepted = places.reduce((sum, [, each]) => sum + each, 0);
  write(find("drafts-note"), drafted ? `${percent(accepted / drafted, 0)} of ${count(drafted)} drafted` : "");
};

const showTime = (state) => {
  const parts = PARTS.map(([name, label], i) => [label, recent.sum((each) => each.totals.seconds[name]), i + 1]);
  const all = parts.reduce((sum, [, spent]) => sum + spent, 0);
  const shown = parts.filter(([, spent]) => spent > 0);
  stack("time", shown.map(([label, spent, place]) => [label, spent, place, seconds(spent)]), all);
  const stalled = state.experts.traffic ? recent.sum((each) => each.experts.traffic.stall_seconds) : 0;
  const span = recent.worked ? "latest work" : "since the start";
  write(find("time-note"), !all ? "no work yet" : stalled ? `${span}, ${percent(stalled / all, 0)} waited for disk` : span);
};

const showPolicy = (state) => {
  terms(find("policy"), [
    ["mode", state.mode],
    ["routing", state.routing],
    ["drafting", state.drafting],
    ["retention", state.policy],
    ["at a time", plural(state.concurrency, "request")],
    ["version", state.version],
  ]);
};

const showRequests = (state) => {
  const running = serving(state).length;
  write(find("requests-note"), `${count(running)} of ${count(state.concurrency)} running, ${count(state.queue)} of ${count(state.max_queue)} waiting`);
  const rows = state.requests.map((each) => [
    String(each.id),
    `${PHASES[each.phase]}${each.phase === "decoding" ? (each.alone ? " alone" : " together") : ""}`,
    each.phase === "prompt" ? `${count(each.read)} of ${count(each.prompt_tokens)}` : count(each.prompt_tokens),
    count(each.cached_tokens),
    `${count(each.completion_tokens)} of ${count(each.max_tokens)}`,
    seconds(each.seconds),
  ]);
  if (!rows.length) {
    const totals = state.totals.requests;
    const ended = totals.stop + totals.length;
    const words = `none now; ${plural(ended, "answer")} given, ${count(totals.cancelled)} cancelled, ${count(totals.failed)} failed, ${count(totals.refused)} refused`;
    find("requests").replaceChildren(make("tr", {}, make("td", { colspan: "6", class: "none words" }, words)));
    return;
  }
  find("requests").replaceChildren(
    ...rows.map((cells) => make("tr", {}, ...cells.map((text, i) => make("td", i === 1 ? { class: "words" } : {}, text)))),
  );
};

const showState = (state) => {
  recent.add(state);
  for (const show of [showStatus, showSpeed, showHits, showMemory, showBudget]) show(state);
  for (const show of [showDrafts, showTime, showPolicy, showRequests]) show(state);
  showMap(state.experts);
};

const lost = (message) => {
  find("status").dataset.state = "failed";
  write(find("status-text"), message);
};

const shownAgain = () =>
  new Promise((resolve) => {
    if (!document.hidden) resolve();
    else document.addEventListener("visibilitychange", () => resolve(), { once: true });
  });

const pause = (time) => new Promise((resolve) => setTimeout(resolve, 1000 * time));

// Follows the engine as long as the page is looked at.
const follow = async () => {
  for (let attempt = 0; ; attempt += 1) {
    await shownAgain();
    const leaving = new AbortController();
    const hide = () => document.hidden && leaving.abort();
    document.addEventListener("visibilitychange", hide);
    try {
      const headers = { Accept: "text/event-stream" };
      for await (const state of events(await request("v1/engine", { headers, signal: leaving.signal }))) {
        attempt = 0;
        showState(state);
      }
      lost("Connection lost");
    } catch (error) {
      if (error.name !== "AbortError") lost(error.status ? error.message : "Not reachable");
    } finally {
      document.removeEventListener("visibilitychange", hide);
    }
    if (!leaving.signal.aborted) await pause(RETRY[Math.min(attempt, RETRY.length - 1)]);
  }
};

export const startLive = () => {
  startMap();
  follow();
};
