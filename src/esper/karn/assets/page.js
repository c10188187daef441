// The page: its views, their addresses, keys and colours.

import { h, href } from "./dom.js";
import { networkView } from "./network.js";
import { runView } from "./run.js";
import { compareView, ownView, proofView, runsView } from "./runs.js";
import { frozen } from "./source.js";
import { whyView } from "./why.js";

const VIEWS = {
  runs: { title: "Runs", show: runsView },
  run: { title: "Run", show: runView, ofRun: true },
  network: { title: "Network", show: networkView, ofRun: true },
  why: { title: "Why", show: whyView, ofRun: true },
  compare: { title: "Compare", show: compareView },
  proof: { title: "Proof", show: proofView },
  own: { title: "Own networks", show: ownView },
};
const SHOWN = !frozen ? Object.keys(VIEWS) : frozen.proof ? ["proof"] : ["run", "network", "why"];
const HELP = {
  [`1 – ${SHOWN.length}`]: "views, in the order of the bar", "/": "search the list", "← →": "epoch",
  "n p": "next and previous action", "[ ]": "round", "e E": "network", space: "play", t: "light or dark",
  "?": "this list",
};

let run = frozen?.run?.id ?? "latest";
let end = () => {};
let keys = {};
let shown = "";

const bar = h("nav", { "aria-label": "views" });
const light = h("span", { id: "state", role: "status" }, frozen ? "report" : "");
const main = h("main", { id: "main", tabindex: "-1" });
const help = h("dialog", { id: "help" }, h("h2", {}, "Keys"),
  h("dl", {}, Object.entries(HELP).map(([key, what]) => [h("dt", {}, key), h("dd", {}, what)])),
  h("form", { method: "dialog" }, h("button", {}, "close")));
const trouble = h("p", { class: "error", role: "alert" });

function parts() {
  const [view, ...rest] = location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
  return SHOWN.includes(view) ? [view, rest] : [SHOWN[0], []];
}

function drawBar(view) {
  bar.replaceChildren(...SHOWN.map((name) => h("a", {
    href: VIEWS[name].ofRun ? href(name, run) : href(name), "aria-current": name === view ? "page" : null,
  }, VIEWS[name].title)));
}

function route() {
  if (location.hash === shown) return;
  shown = location.hash;
  const [view, rest] = parts();
  const { title, show, ofRun } = VIEWS[view];
  if (ofRun) run = rest[0] ||= run;
  end();
  keys = {};
  main.replaceChildren();
  trouble.textContent = "";
  main.dataset.view = view;
  document.title = frozen ? document.title : `${title} · Esper`;
  drawBar(view);
  end = show(main, rest, {
    tell: (state) => { light.textContent = state; light.dataset.state = state; },
    keys: (added) => { keys = added; },
    move: (hash) => { history.replaceState(null, "", hash); shown = hash; },
  });
}

function toggleTheme() {
  const now = getComputedStyle(document.documentElement).colorScheme;
  const dark = now === "dark" || (now !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "light" : "dark";
}

const ANYWHERE = {
  t: toggleTheme,
  "?": () => help.showModal(),
  "/": () => main.querySelector("input[type=search]")?.focus(),
};

addEventListener("keydown", (event) => {
  const typing = event.target.matches("input:not([type=range],[type=checkbox]), select, textarea");
  if (event.ctrlKey || event.metaKey || event.altKey || typing || help.open) return;
  if (event.key === " " && event.target.matches("button, a, summary, input")) return;
  const view = bar.children[Number(event.key) - 1];
  const action = keys[event.key] ?? ANYWHERE[event.key] ?? (view && (() => view.click()));
  if (!action) return;
  event.preventDefault();
  action();
});

/** A run whose values are not what they should be must not leave an empty page. */
function complain(reason) {
  trouble.textContent = `This page cannot show all of the run: ${reason?.message ?? reason}`;
}
addEventListener("error", (event) => complain(event.error ?? event.message));
addEventListener("unhandledrejection", (event) => complain(event.reason));
addEventListener("hashchange", route);
document.body.append(
  h("button", { class: "skip", click: () => main.focus() }, "Skip to content"),
  h("header", {}, h("b", { class: "logo" }, "Esper"), bar, light,
    h("button", { click: toggleTheme, "aria-label": "light or dark", title: "light or dark (t)" }, "◐"),
    h("button", { click: () => help.showModal(), "aria-label": "keys", title: "keys (?)" }, "?")),
  trouble, main, help);
shown = null;
route();
