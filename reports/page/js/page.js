// The page: what is shown follows the state, and the state follows pointer, keys and address.

const KEYS = "Wheel, + and −: zoom. Drag, ← and →: move. 0: whole step. Click: rank and moment, or open a stage. J, K: next and last rank. /: ask for a rank. Below a pixel a height is a share of time; the foot of a backward pass is its recomputation.";

function change(app, changes) {
  Object.assign(app.state, changes);
  [app.state.from, app.state.to] = within(app.state.from, app.state.to, app.first.to);
  const hash = hashOf(app.state, app.first);
  if (hash !== location.hash) history.replaceState(null, "", hash);
  app.asked = app.asked || requestAnimationFrame(() => show(app));
}

function show(app) {
  app.asked = 0;
  const { report, state } = app;
  app.colours = theme();
  const views = available(report);
  const buttons = VIEWS.filter(([name]) => views.has(name)).map(([name, title]) => pressed(title, state.view === name, () => change(app, { view: name })));
  replaceKept(byId("views"), buttons, state.view);
  VIEWS.forEach(([name]) => (byId(name).hidden = state.view !== name));
  if (state.view === "timeline") showTimeline(app);
  if (state.view === "layout") showLayout(app);
  if (state.view === "search") paintSearch(app);
  document.body.dataset.ready = "true";
}

function pressed(title, on, act, ...before) {
  const button = element("button", { type: "button", "aria-pressed": String(on) }, ...before, title);
  button.addEventListener("click", act);
  return button;
}

// New buttons in place of the old where `key` is a new one; the one at the same place keeps the focus.
function replaceKept(place, buttons, key) {
  if (place.dataset.key === key) return;
  place.dataset.key = key;
  const focused = [...place.children].indexOf(document.activeElement);
  place.replaceChildren(...buttons);
  if (focused >= 0 && buttons[focused]) buttons[focused].focus();
}

function showTimeline(app) {
  const { report, state } = app;
  showTools(app);
  app.lanes = layLanes(report, app.groups, state, byId("scroller").clientHeight);
  byId("spacer").style.height = `${app.lanes.height}px`;
  byId("plot").setAttribute("aria-label", `Timeline from ${formatTime(state.from, 5)} to ${formatTime(state.to, 5)}; arrow keys move, plus and minus zoom`);
  if (app.reveal) scrollTo(app);
  paintAxis(app);
  paintLanes(app);
  paintMemory(app);
  const chosen = `${state.rank} ${state.at} ${state.shown}`;
  if (byId("inspector").dataset.key !== chosen) showInspector(app);
  byId("inspector").dataset.key = chosen;
}

function scrollTo(app) {
  app.reveal = false;
  const { lanes } = app.lanes;
  const lane = lanes.find((of) => of.rank === app.state.rank && !of.big) || lanes.find((of) => of.rank === app.state.rank);
  const scroller = byId("scroller");
  if (lane && (lane.top < scroller.scrollTop || lane.top + lane.height > scroller.scrollTop + scroller.clientHeight))
    scroller.scrollTop = Math.max(0, lane.top - scroller.clientHeight / 2);
}

function showTools(app) {
  const { report, state } = app;
  if (document.activeElement !== byId("rank")) byId("rank").value = state.rank;
  byId("rank").setAttribute("placeholder", `0 to ${report.steps[0].classOf.length - 1}`);
  const zoom = (factor) => () => zoomAt(app, (state.from + state.to) / 2, factor);
  const zooms = [["+", 0.5], ["−", 2], ["whole step", 1e9]].map(([title, factor]) => pressed(title, false, zoom(factor)));
  replaceKept(byId("zoom"), zooms, "zoom");
  const sides = report.steps.length > 1 ? ["predicted", "measured", "both"] : [];
  replaceKept(byId("steps"), sides.map((name) => pressed(name, state.shown === name, () => change(app, { shown: name }))), state.shown);
  const ways = report.path && state.shown !== "measured" ? ["critical path"] : [];
  replaceKept(byId("path"), ways.map((name) => pressed(name, state.path, () => change(app, { path: !state.path }))), `${ways} ${state.path}`);
  const present = report.kinds.filter((kind) => app.present.has(kind.name));
  const toggle = (kind) => () => change(app, { hidden: toggled(state.hidden, kind.name) });
  const legend = present.map((kind) => pressed(kind.name, !state.hidden.has(kind.name), toggle(kind), swatch(colourOf(kind, 0, app.colours.dark))));
  replaceKept(byId("legend"), legend, `${[...state.hidden]} ${app.colours.dark}`);
}

function toggled(set, value) {
  const next = new Set(set);
  if (!next.delete(value)) next.add(value);
  return next;
}

function zoomAt(app, time, factor) {
  const { from, to } = app.state;
  const width = Math.min((to - from) * factor, app.first.to);
  const start = time - ((time - from) / (to - from)) * width;
  change(app, { from: start, to: start + width });
}

function pan(app, seconds) {
  change(app, { from: app.state.from + seconds, to: app.state.to + seconds });
}

function chooseRank(app, rank) {
  const step = app.report.steps[0];
  const known = Number.isInteger(rank) && step.classOf[rank] >= 0;
  byId("rank").setAttribute("aria-invalid", String(!known));
  if (!known) return;
  app.reveal = true;
  change(app, { rank });
}

function onClick(app, x, y) {
  const lane = laneAt(app, y);
  if (x < GUTTER) {
    if (lane && lane.head && lane.opens) change(app, { open: toggled(app.state.open, lane.index) });
    else if (lane) change(app, { rank: lane.rank });
    return;
  }
  change(app, { at: Math.min(Math.max(timeAt(app, x), 0), app.first.to), rank: lane ? lane.rank : app.state.rank });
}

function listenToPointer(app) {
  const plot = byId("plot");
  let drag = null;
  const place = (event) => {
    const box = byId("lanes").getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  plot.addEventListener("wheel", (event) => {
    const [x] = place(event);
    if (x < GUTTER) return;
    event.preventDefault();
    const pixel = (app.state.to - app.state.from) / (byId("scroller").clientWidth - GUTTER);
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(app, (event.deltaX || event.deltaY) * pixel);
    else zoomAt(app, timeAt(app, x), 1.0015 ** event.deltaY);
  }, { passive: false });
  plot.addEventListener("pointerdown", (event) => {
    const box = byId("scroller").getBoundingClientRect();
    if (event.button || event.clientX > box.left + byId("scroller").clientWidth) return;
    drag = { at: place(event), from: app.state.from, to: app.state.to, scroll: byId("scroller").scrollTop, moved: false };
    plot.setPointerCapture(event.pointerId);
  });
  plot.addEventListener("pointermove", (event) => {
    const [x, y] = place(event);
    if (drag && drag.at[0] >= GUTTER) {
      const by = drag.at[0] - x;
      drag.moved = drag.moved || Math.hypot(by, drag.at[1] - y) > 3;
      const seconds = (by * (drag.to - drag.from)) / (byId("scroller").clientWidth - GUTTER);
      if (drag.moved) {
        byId("scroller").scrollTop = drag.scroll + drag.at[1] - y;
        change(app, { from: drag.from + seconds, to: drag.to + seconds });
      }
    }
    hover(app, x, y, event);
  });
  plot.addEventListener("pointerup", (event) => {
    const clicked = drag && !drag.moved;
    const inLanes = byId("lanes").getBoundingClientRect();
    drag = null;
    const [x, y] = place(event);
    if (clicked) onClick(app, x, y >= 0 && y <= inLanes.height ? y : -1e9);
  });
  plot.addEventListener("pointerleave", () => {
    app.pointer = null;
    byId("tooltip").hidden = true;
    change(app, {});
  });
}

function hover(app, x, y, event) {
  app.pointer = x >= GUTTER ? timeAt(app, x) : null;
  const inside = y >= 0 && y <= byId("scroller").clientHeight;
  const found = inside && app.lanes ? tooltipOf(app, x, y) : null;
  const tooltip = byId("tooltip");
  tooltip.hidden = !found;
  if (found) {
    const where = `rank ${found.lane.rank}, ${found.lane.step.name}`;
    const head = element("b", {}, ...(found.kind ? [swatch(colourOf(found.kind, 0, app.colours.dark))] : []), found.title);
    tooltip.replaceChildren(head, element("span", { class: "quiet" }, where), factTable(found.facts));
    const box = tooltip.getBoundingClientRect();
    tooltip.style.left = `${Math.min(event.clientX + 14, window.innerWidth - box.width - 8)}px`;
    tooltip.style.top = `${Math.min(event.clientY + 16, window.innerHeight - box.height - 8)}px`;
  }
  change(app, {});
}

function listenToKeys(app) {
  const width = () => app.state.to - app.state.from;
  const middle = () => (app.pointer === null ? (app.state.from + app.state.to) / 2 : app.pointer);
  const step = (by) => () => chooseRank(app, app.state.rank + by);
  const acts = {
    ArrowLeft: () => pan(app, -0.2 * width()), ArrowRight: () => pan(app, 0.2 * width()),
    a: () => pan(app, -0.2 * width()), d: () => pan(app, 0.2 * width()),
    "+": () => zoomAt(app, middle(), 0.6), "=": () => zoomAt(app, middle(), 0.6), w: () => zoomAt(app, middle(), 0.6),
    "-": () => zoomAt(app, middle(), 1 / 0.6), s: () => zoomAt(app, middle(), 1 / 0.6),
    0: () => change(app, { from: 0, to: app.first.to }), Home: () => change(app, { from: 0, to: app.first.to }),
    j: step(1), k: step(-1), Escape: () => change(app, { at: null }), "/": () => (byId("rank").focus(), byId("rank").select()),
  };
  document.addEventListener("keydown", (event) => {
    if (event.target === byId("rank") || event.ctrlKey || event.metaKey || event.altKey || app.state.view !== "timeline") return;
    if (!Object.hasOwn(acts, event.key)) return;
    event.preventDefault();
    acts[event.key]();
  });
  byId("find").addEventListener("submit", (event) => {
    event.preventDefault();
    chooseRank(app, finite(byId("rank").value.replace(/[^0-9]/g, ""), -1));
  });
}

function showHeader(report) {
  byId("title").textContent = report.title;
  byId("plan").textContent = report.plan;
  byId("keys").textContent = KEYS;
  byId("facts").append(
    ...report.facts.map(([name, value, note]) => element("div", {}, element("dt", {}, name), element("dd", {}, value), element("dd", { class: "note" }, note))),
  );
}

async function start() {
  const report = await readReport();
  const state = readState(report, location.hash);
  const app = { report, state, first: firstState(report), groups: groupsOf(report.steps[0]), pointer: null, reveal: true, asked: 0, colours: theme() };
  app.present = new Set(report.steps.flatMap((step) => [...new Set(step.spans.kind)].map((kind) => report.kinds[kind].name)));
  showHeader(report);
  showSearch(app);
  showExplanation(app);
  showDifference(app);
  listenToPointer(app);
  listenToKeys(app);
  byId("scroller").addEventListener("scroll", () => change(app, {}));
  window.addEventListener("resize", () => change(app, {}));
  window.addEventListener("hashchange", () => change(app, { ...readState(report, location.hash) }));
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => change(app, {}));
  show(app);
}

start().catch((error) => {
  byId("failure").hidden = false;
  byId("failure").textContent = `The page cannot be drawn: ${error.message}`;
  console.error(error);
});
