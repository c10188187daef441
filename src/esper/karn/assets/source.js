// Where the data comes from: the server that sent this page, or the page itself if it is a report.

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

const stored = document.getElementById("data");
/** The data of a report; null on a page that a server has sent. */
export const frozen = stored && await unpack(stored.textContent);

const POINTS = 800;
const RETRY = 5000; // milliseconds until a run that is not there is asked for again

async function ask(name, parameters) {
  const answer = await fetch(`api/${name}?${new URLSearchParams(parameters)}`);
  if (!answer.ok) throw new Error((await answer.text()).trim());
  return answer.json();
}

const NOT_HERE = "This report has the decisions of the best and of the last round; `esper ui` shows them all.";

function recall(part, key) {
  const found = frozen[part]?.[key];
  if (!found) throw new Error(NOT_HERE);
  return found;
}

export const getLayout = () => frozen?.layout ?? ask("layout", {});
export const getRound = (run, round) => (frozen ? recall("rounds", round) : ask("round", { run, round }));
export const getEpisode = (run, round, env) =>
  (frozen ? recall("episodes", `${round}/${env}`) : ask("episode", { run, round, env }));
export const getComparison = (runs) => ask("compare", runs.map((run) => ["run", run]));
export const getProof = (proof) => frozen?.proof ?? ask("proof", { proof });

/** Calls `hear` with each message about a run, or about the list of runs if `run` is null. A hidden page
    closes its connection, and goes on from its cursor when it is looked at again. A run that is not there, or
    not yet, is asked for again. Returns a function that ends it. */
export function follow(run, hear, tell) {
  if (frozen) {
    if (frozen.run) hear(frozen.run);
    return () => {};
  }
  let source = null;
  let cursor = "";
  let retry = null;
  function open() {
    const parameters = { ...(run === null ? {} : { run }), ...(cursor ? { cursor } : {}) };
    source = new EventSource(`api/stream?${new URLSearchParams(parameters)}`);
    source.onopen = () => tell("live");
    source.onerror = () => {
      const refused = source.readyState === EventSource.CLOSED;
      tell(refused ? "not found" : "waiting for the server");
      if (refused) retry = setTimeout(open, RETRY);
    };
    source.onmessage = (event) => {
      cursor = event.lastEventId;
      hear(JSON.parse(event.data));
    };
  }
  function close() {
    clearTimeout(retry);
    source?.close();
  }
  function heed() {
    close();
    if (document.visibilityState === "hidden") tell("paused");
    else open();
  }
  document.addEventListener("visibilitychange", heed);
  heed();
  return () => {
    document.removeEventListener("visibilitychange", heed);
    close();
  };
}

/** The curves and parts of a run as its messages build them up. */
export class RunState {
  constructor() {
    this.curves = new Map();
    this.parts = {};
  }

  /** Takes a message in; returns the names of the curves and parts that have changed. */
  apply(message) {
    if (message.whole) this.curves.clear();
    for (const [name, [xs, ys]] of Object.entries(message.curves)) {
      const curve = this.curves.get(name) ?? { x: [], y: [] };
      this.curves.set(name, curve);
      for (let i = 0; i < xs.length; i += 1) {
        if (curve.x.at(-1) === xs[i]) curve.y[curve.y.length - 1] = ys[i];
        else {
          curve.x.push(xs[i]);
          curve.y.push(ys[i]);
        }
      }
      if (curve.x.length > POINTS) thin(curve, POINTS / 2);
    }
    Object.assign(this.parts, message.parts);
    return new Set([...Object.keys(message.curves), ...Object.keys(message.parts)]);
  }

  /** Names of the curves that a key stands for: itself, or all below it if it ends in a slash. */
  names(key) {
    return key.endsWith("/") ? [...this.curves.keys()].filter((name) => name.startsWith(key)) : [key];
  }
}

/** Keeps the lowest and the highest point of each of equal parts, as the server does. */
function thin(curve, points) {
  const kept = [];
  const parts = points / 2;
  for (let part = 0; part < parts; part += 1) {
    const start = Math.floor(part * curve.x.length / parts);
    const end = Math.floor((part + 1) * curve.x.length / parts);
    let [low, high] = [start, start];
    for (let i = start; i < end; i += 1) {
      if (curve.y[i] !== null && (curve.y[low] === null || curve.y[i] < curve.y[low])) low = i;
      if (curve.y[i] !== null && (curve.y[high] === null || curve.y[i] > curve.y[high])) high = i;
    }
    kept.push(...(low === high ? [low] : [Math.min(low, high), Math.max(low, high)]));
  }
  [curve.x, curve.y] = [kept.map((i) => curve.x[i]), kept.map((i) => curve.y[i])];
}
