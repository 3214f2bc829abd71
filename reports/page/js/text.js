// Words, numbers and elements. Text from files only ever becomes text nodes.

const TIMES = [[1, "s"], [1e-3, "ms"], [1e-6, "us"], [1e-9, "ns"]];
const SIZES = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]];

function byId(id) {
  return document.getElementById(id);
}

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return made;
}

function scaled(value, units, digits = 3) {
  const [factor, name] = units.find(([least]) => Math.abs(value) >= least) || units[units.length - 1];
  const number = value / factor;
  return `${Math.abs(number) < 999.5 ? Number(number.toPrecision(digits)) : Math.round(number)} ${name}`;
}

const formatTime = (seconds, digits) => (seconds === 0 ? "0 s" : scaled(seconds, TIMES, digits));
const formatSize = (bytes) => scaled(bytes, SIZES);
const formatCount = (number) => number.toLocaleString("en-US");
const formatPercent = (fraction) => `${Number((100 * fraction).toPrecision(3))} %`;

function swatch(colour) {
  const made = element("span", { class: "swatch" });
  made.style.background = colour;
  return made;
}

function plural(count, word) {
  return `${formatCount(count)} ${word}${count === 1 ? "" : "s"}`;
}

// "0 to 7" where numbers follow each other, "3, 11, 19, … 1,019" otherwise.
function formatRanks(ranks) {
  const last = ranks[ranks.length - 1];
  if (ranks.length > 2 && last - ranks[0] === ranks.length - 1) return `${ranks[0]} to ${last}`;
  return ranks.length <= 8 ? ranks.join(", ") : `${ranks.slice(0, 4).join(", ")}, … ${last}`;
}
