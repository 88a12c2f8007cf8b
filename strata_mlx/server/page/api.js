// Requests to the server that this page comes from, with the key that it may ask for.

const STORED = "strata-mlx key"; // in this tab, until it is closed

// What went wrong, in words for the reader. status: of the response, 0 where there was none.
export class RequestError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

let asked = null;

// ask: a function that resolves to a key; refused says whether one was tried before.
let ask = () => Promise.reject(new Error("nobody answers for the key"));
export const onKeyNeeded = (answer) => {
  ask = answer;
};

const headers = () => {
  const key = sessionStorage.getItem(STORED);
  return key ? { Authorization: `Bearer ${key}` } : {};
};

// Several requests that need a key have it asked for once.
const askOnce = (sent) => {
  if (sent !== sessionStorage.getItem(STORED)) return Promise.resolve(); // another was given meanwhile
  asked ??= ask(sent !== null).then((key) => {
    sessionStorage.setItem(STORED, key);
    asked = null;
  });
  return asked;
};

const send = async (path, options) => {
  let response;
  try {
    response = await fetch(path, { ...options, headers: { ...options.headers, ...headers() }, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new RequestError("The server cannot be reached. Is it still running?", 0);
  }
  return response;
};

const messageOf = async (response) => {
  const wait = response.headers.get("Retry-After");
  let said = "";
  try {
    said = (await response.json()).error.message;
  } catch {
    said = `The server answered ${response.status} ${response.statusText}`.trim();
  }
  return response.status === 429 && wait ? `${said} (try again in ${wait} s)` : said;
};

// A response that is not an error. Raises RequestError, or AbortError where options.signal says so.
export const request = async (path, options = {}) => {
  for (;;) {
    const sent = sessionStorage.getItem(STORED);
    const response = await send(path, options);
    if (response.ok) return response;
    if (response.status !== 401) throw new RequestError(await messageOf(response), response.status);
    await askOnce(sent);
  }
};

// The data of server-sent events, parsed, as they come. ``[DONE]`` ends them.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      let chunk;
      try {
        chunk = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new RequestError("The connection to the server broke.", 0);
      }
      if (chunk.done) return;
      buffer += chunk.value.replaceAll("\r", "");
      const parts = buffer.split("\n\n");
      buffer = parts.pop();
      for (const part of parts) {
        const lines = part.split("\n").filter((line) => line.startsWith("data:"));
        if (!lines.length) continue;
        const data = lines.map((line) => line.slice(5).trimStart()).join("\n");
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
