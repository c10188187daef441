// One network at one epoch, drawn: the host, its slots, and the seeds in them. What the place is made of.

import { Chart } from "./charts.js";
import { h, href, number, s, stage, table } from "./dom.js";
import { STAGES, followRun, laneOf, outcome, slotOrder } from "./run.js";
import { getEpisode, getRound } from "./source.js";

export const NEWEST = "newest";
const short = (text, most) => (text.length > most ? `…${text.slice(1 - most)}` : text);

/** The seed in a slot at an epoch; null if the slot is empty. */
export function seedAt(bands, epoch) {
  const band = bands?.find(({ from, to }) => from <= epoch && epoch <= to);
  return band ? { ...band, alpha: band.alpha[epoch - band.from], contribution: band.contribution[epoch - band.from] } : null;
}

/** The drawing. Activations run along the line from the input to the output, downwards where there is little
    room. A seed's colour is its stage, its length its parameters, its opacity its alpha. */
function drawing(width, slots, epoch, largest) {
  const names = Object.keys(slots);
  const upright = width < 170 * (names.length + 0.7);
  const step = upright ? 96 : (width - 110) / names.length;
  const [trunk, length] = [upright ? 34 : 128, upright ? step * names.length + 60 : width];
  const size = upright ? [width, length] : [width, 180];
  // (along, across) → x, y: along the activations, across to the side where the seeds are.
  const at = (along, across) => (upright ? [trunk + across, along] : [along, trunk - across]);
  const line = (from, to, attributes) => {
    const [[x1, y1], [x2, y2]] = [at(...from), at(...to)];
    return s("line", { x1, y1, x2, y2, ...attributes });
  };
  const word = (along, across, text, attributes = {}) => {
    const [x, y] = at(along, across);
    return s("text", { x, y: y + 4, ...attributes }, text);
  };
  const parts = [line([12, 0], [length - 12, 0], { class: "trunk" })];
  const end = upright ? { "text-anchor": "start" } : { "text-anchor": "middle" };
  parts.push(word(upright ? 14 : 26, upright ? 14 : -20, "input", end), word(length - (upright ? 14 : 28), upright ? 14 : -20, "output", end));
  names.forEach((slot, i) => {
    const middle = (upright ? 20 : 40) + step * (i + 0.62);
    const [hx, hy] = at(middle - step * 0.42, 0);
    parts.push(s("rect", { class: "host", x: hx - 15, y: hy - 15, width: 30, height: 30, rx: 5 }, s("title", {}, `host, before ${slot}`)));
    const seed = seedAt(slots[slot], epoch);
    const group = s("g", { class: "seed", "data-slot": slot, "data-stage": seed?.stage ?? "DORMANT" });
    const reach = upright ? 46 : 58;
    if (seed) {
      const long = 18 + (upright ? width - trunk - reach - 190 : step * 0.62) * (seed.params ?? 0) / Math.max(largest, 1);
      const alpha = seed.alpha ?? 0;
      const words = [seed.blueprint ?? "unknown", `${seed.stage.toLowerCase()}, α ${number(alpha)}`,
        `${number(seed.params)} parameters`];
      const wire = { class: "wire", "stroke-width": 1 + 3 * alpha };
      group.append(s("title", {}, `${slot}: ${words.join(", ")}; contribution ${number(seed.contribution)} points`),
        line([middle - 14, 0], [middle - 14, reach], wire), line([middle + 14, 0], [middle + 14, reach], wire));
      const [x, y] = at(middle, reach);
      const box = upright ? { x: x - 9, y: y - 20, width: long, height: 40 } : { x: x - long / 2, y: y - 17, width: long, height: 34 };
      group.append(s("rect", { class: `body ${seed.stage}`, rx: 6, ...box, "fill-opacity": 0.15 + 0.85 * alpha }));
      words.forEach((text, k) => group.append(upright
        ? s("text", { class: k ? "" : "strong", x: x + long, y: y - 11 + 15 * k }, text)
        : s("text", { class: k ? "" : "strong", x, y: y - 52 + 15 * k, "text-anchor": "middle" }, text)));
    }
    const [x, y] = at(middle, 0);
    group.append(s("circle", { class: seed ? "node" : "node empty", cx: x, cy: y, r: seed ? 14 : 8 }),
      seed ? s("text", { class: "plus", x, y: y + 5, "text-anchor": "middle" }, "+") : null,
      s("text", upright ? { x: x + 22, y: y + (seed ? 36 : 4) } : { x, y: y + 34, "text-anchor": "middle" }, short(slot, 22), seed ? "" : " (empty)"));
    parts.push(group);
  });
  const seeds = names.map((slot) => [slot, seedAt(slots[slot], epoch)]).filter(([, seed]) => seed);
  const label = seeds.map(([slot, seed]) => `${slot}: ${seed.blueprint} ${seed.stage}`).join("; ") || "no seeds";
  return s("svg", { id: "drawing", viewBox: `0 0 ${size[0]} ${size[1]}`, width: size[0], height: size[1], role: "img", "aria-label": `epoch ${epoch}: ${label}` }, parts);
}

/** What both views of an episode share: the choice of round, network and epoch, by hand, keys or playing. `show`
    draws `{state, round, network, episode, epoch}`. */
export function placeView(view, main, [run, round = NEWEST, env = "0", epoch = ""], { tell, keys, move }, show) {
  const place = { round, env: Number(env), epoch: epoch === "" ? null : Number(epoch) };
  const rounds = h("select", { "aria-label": "round", change: () => turn({ round: rounds.value }) });
  const envs = h("select", { "aria-label": "network", change: () => turn({ env: Number(envs.value) }) });
  const slider = h("input", { type: "range", min: 1, max: 1, value: 1, id: "epoch", "aria-label": "epoch", input: () => turn({ epoch: Number(slider.value) }) });
  const written = h("output", { for: "epoch" });
  const playing = h("button", { id: "play", click: () => play() }, "▶ play");
  const title = h("h1");
  const note = h("p", { class: "note" });
  const body = h("div");
  main.append(title, h("div", { class: "bar place" }, h("label", {}, "round ", rounds), h("label", {}, "network ", envs), playing, slider, written), note, body);
  let found = null;
  let state = null;
  let asked = 0;
  let timer = null;

  const actions = () => found.episode?.steps.filter((step) => step.op !== "WAIT").map((step) => step.epoch) ?? [];
  function draw() {
    const last = found.round.epochs;
    const epoch = Math.min(Math.max(place.epoch ?? (view === "why" ? actions().at(-1) ?? last : last), 1), last);
    Object.assign(slider, { max: last, value: epoch });
    written.textContent = `epoch ${epoch} of ${last}`;
    envs.value = place.env;
    move(href(view, run, place.round, place.env, ...(place.epoch === null ? [] : [epoch])));
    show(body, { run, state, ...found, epoch, turn });
  }
  async function load() {
    const { recorded } = state.parts;
    const wanted = place.round === NEWEST ? recorded.rounds.at(-1) : Number(place.round);
    const number_ = asked += 1;
    title.textContent = `${view === "why" ? "Why" : "Network"}: ${run}`;
    if (wanted === undefined) {
      note.textContent = "No round of this run has recorded steps yet. They are written when a round ends, from level normal on.";
      return;
    }
    try {
      const all = await getRound(run, wanted);
      const network = all.envs.find((one) => one.env === place.env);
      if (!network) throw new Error(`round ${wanted} has no env ${place.env}; it has ${all.envs.map((one) => one.env).join(", ")}`);
      const [episode, problem] = await Promise.resolve().then(() => getEpisode(run, wanted, place.env)).then((e) => [e, ""], (e) => [null, e.message]);
      if (number_ !== asked) return;
      envs.replaceChildren(...all.envs.map((one) => h("option", { value: one.env }, one.env)));
      note.textContent = problem || `Round ${wanted}: ${outcome(network.outcome)}`;
      found = { round: all, network, episode };
      draw();
    } catch (error) {
      note.textContent = error.message;
      body.replaceChildren();
    }
  }
  function turn(change) {
    const same = change.epoch !== undefined && Object.keys(change).length === 1;
    if ("round" in change || "env" in change) place.epoch = change.epoch ?? null;
    Object.assign(place, change);
    if (same && found) draw();
    else load();
  }
  function play() {
    if (timer) {
      clearInterval(timer);
      timer = null;
    } else {
      if (Number(slider.value) >= found.round.epochs) turn({ epoch: 1 });
      timer = setInterval(() => {
        const next = Number(slider.value) + 1;
        if (next > found.round.epochs) play();
        else turn({ epoch: next });
      }, 450);
    }
    playing.textContent = timer ? "⏸ pause" : "▶ play";
  }
  const step = (by) => () => found && turn({ epoch: Math.min(Math.max(Number(slider.value) + by, 1), found.round.epochs) });
  const act = (by) => () => {
    const now = Number(slider.value);
    const next = by > 0 ? actions().find((e) => e > now) : actions().filter((e) => e < now).at(-1);
    if (next) turn({ epoch: next });
  };
  const neighbour = (by) => () => {
    const all = found?.round.envs.map((one) => one.env) ?? [];
    turn({ env: all[(all.indexOf(place.env) + by + all.length) % all.length] });
  };
  const other = (by) => () => {
    const all = state.parts.recorded.rounds;
    const next = all[all.indexOf(found.round.round) + by];
    if (next) turn({ round: String(next) });
  };
  keys({ ArrowLeft: step(-1), ArrowRight: step(1), p: act(-1), n: act(1), "[": other(-1), "]": other(1), e: neighbour(1), E: neighbour(-1), " ": play });
  const end = followRun(run, (news, changed) => {
    state = news;
    if (changed && !changed.has("recorded")) return;
    const { rounds: recorded, best } = state.parts.recorded;
    rounds.replaceChildren(h("option", { value: NEWEST }, `newest (${recorded.at(-1) ?? "none"})`),
      ...[...recorded].reverse().map((r) => h("option", { value: r }, `${r}${r === best ? " (best J)" : ""}`)));
    rounds.value = place.round;
    if (!changed || place.round === NEWEST) load();
  }, tell);
  return () => {
    clearInterval(timer);
    end();
  };
}

export function networkView(main, args, context) {
  let lanes = null;
  let course = null;
  return placeView("network", main, args, context, (body, { run, state, round, network, episode, epoch, turn }) => {
    const slots = laneOf(network, state.parts.start);
    const largest = Math.max(1, ...Object.values(slots).flat().map((band) => band.params ?? 0));
    if (!lanes || !body.children.length) {
      lanes = new Chart({ type: "lanes", title: "Growth", note: "Bands are stages, the line is alpha." });
      course = new Chart({ type: "lines", title: "Accuracy", note: "(points) Before each decision.", label: "epoch" });
      body.append(h("div", { id: "stage" }), h("div", { class: "legend" }, STAGES.map((name) => stage(name))), h("div", { id: "seeds" }),
        h("div", { class: "grid" }, lanes.element, course.element));
      lanes.holder.addEventListener("click", (event) => {
        const box = lanes.holder.querySelector("rect").getBoundingClientRect();
        turn({ epoch: Math.min(Math.max(Math.ceil((event.clientX - box.left) / box.width * round.epochs), 1), round.epochs) });
      });
    }
    const holder = body.querySelector("#stage");
    holder.replaceChildren(drawing(holder.clientWidth, slots, epoch, largest));
    lanes.set(slots, { epochs: round.epochs, at: epoch });
    const steps = episode?.steps ?? [];
    course.set([{ name: "accuracy", x: steps.map((one) => one.epoch), y: steps.map((one) => one.accuracy) }], { at: epoch });
    const now = steps.find((one) => one.epoch === epoch);
    const grown = slotOrder(state.parts.start).map((slot) => [slot, seedAt(slots[slot], epoch)]).filter(([, seed]) => seed);
    body.querySelector("#seeds").replaceChildren(
      now ? h("p", {}, "Decision: ", h("b", {}, `${now.op} ${now.slot ?? ""} ${now.blueprint ?? ""}`), now.executed === false && now.op !== "WAIT" ? " (refused) " : " ",
        h("a", { href: href("why", run, round.round, network.env, epoch) }, "why?")) : "",
      grown.length ? table(grown.map(([slot, seed]) => ({ slot, blueprint: seed.blueprint, stage: stage(seed.stage), alpha: seed.alpha, parameters: seed.params, contribution: seed.contribution })))
        : h("p", { class: "absent" }, "No seed at this epoch."));
  });
}
