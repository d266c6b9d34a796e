// Activations: φ, φ' and, for centered Gaussians u and v with variances p, q and covariance k, the
// expectations E[φ(u)φ(v)] and E[φ'(u)φ'(v)]. `dual(k, p, q, out)` writes both to `out`, and
// `variance(q, out)` writes them for u = v.

const TWO_PI = 2 * Math.PI;

const ERF_STEP = 1 / 128, ERF_END = 6;

const ERF_VALUES = (() => {
  // Taylor's series of ∫ exp(−s²) from each node to the next one
  const values = new Float64Array(ERF_END / ERF_STEP + 1);
  for (let i = 1; i < values.length; i++) {
    const x = (i - 0.5) * ERF_STEP, h = ERF_STEP / 2;
    const even = [1, (4 * x * x - 2) / 6, (16 * x ** 4 - 48 * x * x + 12) / 120];
    const area = 2 * h * (even[0] + even[1] * h * h + even[2] * h ** 4);
    values[i] = values[i - 1] + (2 / Math.sqrt(Math.PI)) * Math.exp(-x * x) * area;
  }
  return values;
})();

function erf(x) {
  const size = Math.abs(x);
  if (size >= ERF_END) return Math.sign(x);
  const i = Math.round(size / ERF_STEP), node = i * ERF_STEP, d = size - node;
  const slope = (2 / Math.sqrt(Math.PI)) * Math.exp(-node * node);
  const series = 1 - node * d + ((4 * node * node - 2) * d * d) / 6
    - ((8 * node ** 3 - 12 * node) * d ** 3) / 24;
  return Math.sign(x) * (ERF_VALUES[i] + slope * d * series);
}

const normalCdf = (x) => 0.5 * (1 + erf(x * Math.SQRT1_2));
const normalPdf = (x) => Math.exp(-0.5 * x * x) / Math.sqrt(TWO_PI);
const sigmoid = (x) => 1 / (1 + Math.exp(-x));

function determinant(k, p, q) {
  const root = Math.sqrt(p * q);
  return Math.max((root - k) * (root + k), 0);
}

// φ(u) = u for u > 0 and slope·u for u < 0
function leakyDual(slope) {
  const gap = (1 - slope) ** 2;
  return (k, p, q, out) => {
    const side = Math.sqrt(determinant(k, p, q)), angle = Math.PI - Math.atan2(side, k);
    out[0] = slope * k + (gap * (side + angle * k)) / TWO_PI;
    out[1] = slope + (gap * angle) / TWO_PI;
  };
}

function leakyVariance(slope) {
  const half = (1 + slope * slope) / 2;
  return (q, out) => { out[0] = half * q; out[1] = half; };
}

function erfDual(k, p, q, out) {
  const one = 1 + 2 * p, two = 1 + 2 * q;
  const root = Math.sqrt(1 + 2 * p + 2 * q + 4 * determinant(k, p, q));
  out[0] = (2 / Math.PI) * Math.asin((2 * k) / Math.sqrt(one * two));
  if (2 * Math.abs(k) > 0.9 * Math.sqrt(one * two)) out[0] = (2 / Math.PI) * Math.atan2(2 * k, root);
  out[1] = 4 / Math.PI / root;
}

function geluDual(k, p, q, out) {
  const outer = (1 + p) * (1 + q), product = p * q;
  const square = 1 + p + q + determinant(k, p, q), delta = Math.sqrt(square);
  const angle = Math.atan2(k, delta) / TWO_PI + 0.25;
  out[0] = k * angle + (((k * k) / square + product) * delta) / (TWO_PI * outer);
  out[1] = angle + ((1 / square + (1 - product) / outer + 1) * k) / (TWO_PI * delta);
}

function sinDual(k, p, q, out) {
  // expm1, since small variances would lose their digits beside one
  const damping = Math.exp(-(p + q) / 2 + Math.abs(k)), fall = Math.expm1(-2 * Math.abs(k));
  out[0] = (-Math.sign(k) * damping * fall) / 2;
  out[1] = (damping * (2 + fall)) / 2;
}

function bumpDual(k, p, q, out) {
  const delta = 1 + 2 * (p + q) + 4 * determinant(k, p, q);
  out[0] = 1 / Math.sqrt(delta);
  out[1] = (4 * k * out[0]) / delta;
}

const onDiagonal = (dual) => (q, out) => dual(q, q, q, out);

const linearDual = (k, p, q, out) => { out[0] = k; out[1] = 1; };

function closed(label, code, apply, slope, dual, variance) {
  return { label, code, apply, slope, dual, variance: variance || onDiagonal(dual), exact: true };
}

const ACTIVATIONS = {
  relu: closed("ReLU", "nn.ReLU()", (u) => (u > 0 ? u : 0), (u) => (u > 0 ? 1 : 0),
    leakyDual(0), leakyVariance(0)),
  leaky: closed("leaky ReLU", "nn.LeakyReLU(0.1)", (u) => (u > 0 ? u : 0.1 * u),
    (u) => (u > 0 ? 1 : 0.1), leakyDual(0.1), leakyVariance(0.1)),
  gelu: closed("GELU", "nn.GELU()", (u) => u * normalCdf(u), (u) => normalCdf(u) + u * normalPdf(u),
    geluDual),
  erf: closed("erf", "modules.Erf()", erf, (u) => (2 / Math.sqrt(Math.PI)) * Math.exp(-u * u), erfDual),
  sin: closed("sin", "modules.Sin()", Math.sin, Math.cos, sinDual),
  abs: closed("absolute value", "modules.Abs()", Math.abs, Math.sign, leakyDual(-1), leakyVariance(-1)),
  bump: closed("Gaussian bump", "modules.GaussianBump()", (u) => Math.exp(-u * u),
    (u) => -2 * u * Math.exp(-u * u), bumpDual),
  linear: closed("linear", "nn.Identity()", (u) => u, () => 1, linearDual),
};
