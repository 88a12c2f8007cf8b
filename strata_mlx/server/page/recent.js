// What the engine did lately, from the totals of the states that it sends.

const WORK = 30; // seconds of work that shares are about
export const SHOWN = 30; // seconds that the line of speeds shows
const SMOOTH = 1.5; // seconds that a speed is averaged over
const SHORTEST = 0.3; // and how many it takes to say one at all

const tokens = (state) => state.totals.completion_tokens;

export class Recent {
  #samples = []; // {clock, state}; clock: seconds of work
  #speeds = []; // {at, tokens, speed}
  #clock = 0;

  add(state) {
    const last = this.#samples.at(-1)?.state;
    if (last && (state.at < last.at || tokens(state) < tokens(last))) this.#restart();
    this.#addSpeed(state);
    const previous = this.#samples.at(-1);
    if (!previous) {
      this.#samples.push({ clock: 0, state });
      return;
    }
    const working = state.requests.length > 0 || tokens(state) !== tokens(previous.state);
    if (!working) {
      previous.state = state; // idle time is no time: what comes next is counted from its end
      return;
    }
    this.#clock += state.at - previous.state.at;
    this.#samples.push({ clock: this.#clock, state });
    while (this.#clock - this.#samples[1].clock >= WORK) this.#samples.shift();
  }

  #restart() {
    this.#samples = [];
    this.#speeds = [];
    this.#clock = 0;
  }

  #addSpeed(state) {
    const { at } = state;
    const since = this.#speeds.findLast((each) => at - each.at >= SMOOTH) ?? this.#speeds[0];
    const speed = since && at - since.at >= SHORTEST ? (tokens(state) - since.tokens) / (at - since.at) : 0;
    this.#speeds.push({ at, tokens: tokens(state), speed });
    while (at - this.#speeds[0].at > SHOWN + SMOOTH) this.#speeds.shift();
  }

  // Whether any work was seen; until then, sums are since the start of the server.
  get worked() {
    return this.#samples.length > 1;
  }

  // By how much ``total``, a function of a state, has grown.
  sum(total) {
    const latest = total(this.#samples.at(-1).state);
    return this.worked ? latest - total(this.#samples[0].state) : latest;
  }

  // Tokens per second now.
  get speed() {
    return this.#speeds.at(-1)?.speed ?? 0;
  }

  // Of the last SHOWN seconds: [seconds ago, tokens per second].
  get speeds() {
    const end = this.#speeds.at(-1)?.at ?? 0;
    return this.#speeds.map(({ at, speed }) => [end - at, speed]);
  }

  // In the last second or so, by how much ``total`` has grown per second.
  rate(total) {
    const latest = this.#samples.at(-1);
    const since = this.#samples.findLast(({ state }) => latest.state.at - state.at >= 1);
    if (!since) return 0;
    return (total(latest.state) - total(since.state)) / (latest.state.at - since.state.at);
  }
}
