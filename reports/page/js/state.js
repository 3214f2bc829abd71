// What is shown lives in the address: a link opens the page as it was seen.

const VIEWS = [
  ["timeline", "Timeline"], ["layout", "Plan and memory"], ["search", "Search"], ["explanation", "Explanation"],
  ["difference", "Predicted and measured"],
];

function firstState(report) {
  const measured = report.steps.length > 1;
  const length = Math.max(...report.steps.map((step) => step.length));
  return {
    view: "timeline", rank: report.steps[0].ranksOf[0][0], from: 0, to: length, at: null, open: new Set(),
    hidden: new Set(), shown: measured ? "both" : "predicted", path: false,
  };
}

function pathShown({ report, state }) {
  return report.path !== null && state.path && state.shown !== "measured";
}

function finite(text, otherwise) {
  const value = text === null || text.trim() === "" ? NaN : Number(text);
  return Number.isFinite(value) ? value : otherwise;
}

function readState(report, hash) {
  const first = firstState(report);
  const asked = new URLSearchParams(hash.replace(/^#/, ""));
  const state = { ...first };
  const has = available(report);
  if (has.has(asked.get("view"))) state.view = asked.get("view");
  if (["predicted", "measured", "both"].includes(asked.get("shown")) && report.steps.length > 1) state.shown = asked.get("shown");
  const rank = finite(asked.get("rank"), first.rank);
  if (report.steps[0].classOf[rank] >= 0) state.rank = rank;
  [state.from, state.to] = within(finite(asked.get("from"), first.from), finite(asked.get("to"), first.to), first.to);
  const at = finite(asked.get("at"), null);
  if (at !== null && at >= 0 && at <= first.to) state.at = at;
  const list = (name) => (asked.get(name) || "").split(",").filter(Boolean);
  state.open = new Set(list("open").map(Number).filter(Number.isInteger));
  state.hidden = new Set(list("hide"));
  state.path = asked.get("path") === "critical" && report.path !== null;
  return state;
}

function available(report) {
  const has = new Set(["timeline", "layout"]);
  if (report.searches.length) has.add("search");
  if (report.explanation.length) has.add("explanation");
  if (report.difference) has.add("difference");
  return has;
}

// The window [from, to], kept inside [0, length] and no narrower than the page can tell apart.
function within(from, to, length) {
  const width = Math.min(Math.max(to - from, length * 1e-7), length);
  const start = Math.min(Math.max(from, 0), length - width);
  return [start, start + width];
}

function hashOf(state, first) {
  const seconds = (value) => Number(value.toPrecision(9));
  const asked = new URLSearchParams({ view: state.view, rank: state.rank });
  if (state.from !== 0 || state.to !== first.to) {
    asked.set("from", seconds(state.from));
    asked.set("to", seconds(state.to));
  }
  if (state.at !== null) asked.set("at", seconds(state.at));
  if (state.open.size) asked.set("open", [...state.open].join(","));
  if (state.hidden.size) asked.set("hide", [...state.hidden].join(","));
  if (state.path) asked.set("path", "critical");
  if (state.shown !== first.shown) asked.set("shown", state.shown);
  return `#${asked}`;
}
