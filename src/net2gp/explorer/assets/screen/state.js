// What the page shows, and the same in the fragment of its address.

const X_RANGE = [-3, 3], Y_RANGE = [-2.6, 2.6];
const WIDTHS = [4, 8, 16, 32, 64, 128, 256, 512, 1024, Infinity];
const MODES = ["prior", "posterior", "training"];
const LIMITS = { depth: [1, 8], weightVar: [0.05, 6], biasVar: [0, 2], noise: [1e-4, 1], steps: [1, 2000] };

const PRESETS = {
  wave: ["A wave", [-2.4, -1.9, -1.1, -0.6, 0.1, 0.7, 1.8, 2.3].map((x) => [x, 1.1 * Math.sin(2 * x)])],
  gap: ["Two clusters", [-2.3, -2.05, -1.8, -1.6, 1.2, 1.45, 1.7, 2].map((x) => [x, Math.cos(1.5 * x)])],
  step: ["A step", [-2.5, -1.9, -1.3, -0.8, -0.2, 0.2, 0.8, 1.3, 1.9, 2.5].map((x) => [x, x < 0 ? -0.8 : 0.8])],
  few: ["Three points", [[-1.5, -0.6], [0.2, 0.9], [1.6, 0.1]]],
  many: ["Fifty points", Array.from({ length: 50 }, (_, i) => {
    const x = -2.9 + (5.8 * i) / 49;
    return [x, 0.9 * Math.sin(2.2 * x) + 0.35 * Math.cos(5 * x + 1) + 0.12 * Math.sin(37 * i)];
  })],
};

const round = (value, digits = 4) => Number(value.toPrecision(digits));
const roundPoint = ([x, y]) => [Math.round(x * 1000) / 1000, Math.round(y * 1000) / 1000];

function initialState() {
  return { mode: "posterior", depth: 2, activation: "gelu", width: Infinity, norm: false, skip: false, weightVar: 2.7,
    biasVar: 1.4, noise: 0.01, steps: 200, kernel: "nngp", seed: 1, points: PRESETS.wave[1].map(roundPoint) };
}

function toFragment(state) {
  const parts = Object.entries(state).filter(([name]) => name !== "points").map(([name, value]) => {
    const text = value === Infinity ? "inf" : typeof value === "boolean" ? Number(value) : value;
    return `${name}=${text}`;
  });
  parts.push(`points=${state.points.map((p) => p.join(",")).join(";")}`);
  return parts.join("&");
}

function inRange(name, value, fallback) {
  const [low, high] = LIMITS[name];
  return Number.isFinite(value) ? Math.min(Math.max(value, low), high) : fallback;
}

// The state of a fragment; what it lacks or gets wrong keeps its first value
function fromFragment(text) {
  const state = initialState(), given = new URLSearchParams(text.replace(/^#/, ""));
  for (const name of Object.keys(LIMITS)) {
    if (given.has(name)) state[name] = inRange(name, parseFloat(given.get(name)), state[name]);
  }
  state.depth = Math.round(state.depth);
  state.steps = Math.round(state.steps);
  for (const name of ["norm", "skip"]) if (given.has(name)) state[name] = given.get(name) === "1";
  if (ACTIVATIONS[given.get("activation")]) state.activation = given.get("activation");
  if (MODES.includes(given.get("mode"))) state.mode = given.get("mode");
  if (["nngp", "ntk"].includes(given.get("kernel"))) state.kernel = given.get("kernel");
  const width = given.get("width") === "inf" ? Infinity : Number(given.get("width"));
  if (WIDTHS.includes(width)) state.width = width;
  if (/^\d{1,9}$/.test(given.get("seed") || "")) state.seed = Number(given.get("seed"));
  if (given.has("points")) {
    const points = given.get("points").split(";").filter(Boolean).map((pair) => pair.split(",").map(Number));
    const good = points.filter((p) => p.length === 2 && p.every(Number.isFinite));
    state.points = good.slice(0, 60).map(clampPoint);
  }
  return state;
}

function clampPoint([x, y]) {
  return roundPoint([Math.min(Math.max(x, X_RANGE[0]), X_RANGE[1]), Math.min(Math.max(y, Y_RANGE[0]), Y_RANGE[1])]);
}

function netOf(state) {
  const { depth, activation, weightVar, biasVar, norm, skip } = state;
  return { depth, activation, weightVar, biasVar, norm, skip };
}
