// Signal propagation through deep networks: q ← V(q) = σ_w² E[φ²] + σ_b² for the variance of one input, and the map
// of the correlation of two. Where the slope χ₁ of the latter at 1 is one lies the line between order and chaos.

const PHASE_OUT = new Float64Array(2);
const SMALLEST_Q = 1e-9, LARGEST_Q = 1e9, MARGIN = 1e-11;

function moments(activation, q) {
  ACTIVATIONS[activation].variance(q, PHASE_OUT);
  return { value: PHASE_OUT[0], slope: PHASE_OUT[1] };
}

// The root of f between two places where its signs differ, by the method of Illinois in log q
function rootBetween(f, low, high) {
  let a = Math.log(low), b = Math.log(high), fa = f(low), fb = f(high), side = 0;
  for (let i = 0; i < 200 && Math.abs(b - a) > 1e-14 * Math.max(1, Math.abs(a)); i++) {
    let c = (fa * b - fb * a) / (fa - fb);
    if (!(c > Math.min(a, b) && c < Math.max(a, b))) c = (a + b) / 2;
    const fc = f(Math.exp(c));
    if (fc === 0) return Math.exp(c);
    if (fc > 0 === fb > 0) {
      b = c;
      fb = fc;
      if (side === -1) fa /= 2;
      side = -1;
    } else {
      a = c;
      fa = fc;
      if (side === 1) fb /= 2;
      side = 1;
    }
  }
  return Math.exp((a + b) / 2);
}

// q* = V(q*) next to 1, on the side to which V moves it: 0 where signals die out, ∞ where they explode
function fixedPoint(activation, w, b) {
  const excess = (q) => w * moments(activation, q).value + b - q;
  const start = excess(1), step = start > 0 ? 2 : 0.5;
  if (Math.abs(start) < MARGIN) return 1;
  for (let near = 1, far = step; ; near = far, far *= step) {
    if (far > LARGEST_Q) return Infinity;
    if (far < SMALLEST_Q) return b > 0 ? b : 0;
    if (excess(far) > 0 !== start > 0) return rootBetween(excess, Math.min(near, far), Math.max(near, far));
  }
}

const clampQ = (q) => Math.min(Math.max(q, SMALLEST_Q), LARGEST_Q);

// χ₁ = σ_w² E[φ'(√q* z)²]
const slopeAt = (activation, w, q) => w * moments(activation, clampQ(q)).slope;

// c* = R(c*), the correlation that two different inputs end with, by Newton's method from zero
function correlationFixedPoint(activation, w, b, q) {
  const settled = q > 0 && q < Infinity, p = clampQ(q), bias = settled ? b : 0;
  const total = w * moments(activation, p).value + bias;
  if ((slopeAt(activation, w, p) * p) / total <= 1 + (ACTIVATIONS[activation].exact ? 1e-9 : 1e-5)) return 1;
  let c = 0;
  for (let i = 0; i < 100; i++) {
    ACTIVATIONS[activation].dual(c * p, p, p, PHASE_OUT);
    const gap = (w * PHASE_OUT[0] + bias) / total - c, steep = 1 - (w * PHASE_OUT[1] * p) / total;
    const move = steep > 0 ? gap / steep : 0;
    c = Math.min(Math.max(c + move, 0), 1);
    if (!(move > 1e-13)) break;
  }
  return c;
}

// {q, chi, c, depth}: depth is the number of layers over which correlations approach c by a factor e
function phaseAt(activation, w, b) {
  const q = fixedPoint(activation, w, b), chi = slopeAt(activation, w, q), p = clampQ(q);
  const c = correlationFixedPoint(activation, w, b, q), settled = q > 0 && q < Infinity;
  let rate = chi;
  if (c < 1) {
    ACTIVATIONS[activation].dual(c * p, p, p, PHASE_OUT);
    rate = w * PHASE_OUT[1];
  }
  if (!settled) rate *= p / (w * moments(activation, p).value);
  const decay = -Math.log(Math.abs(rate));
  return { q, chi, c, depth: decay > MARGIN ? 1 / decay : Infinity };
}

// The weight variance at which χ₁ = 1 for a bias variance, or NaN: q − E[φ²]/E[φ'²] = σ_b² there
function criticalWeight(activation, b) {
  const ratio = (q) => {
    const { value, slope } = moments(activation, q);
    return q - value / slope - b;
  };
  const zero = ACTIVATIONS[activation].exact ? 1e-9 : 1e-5;
  let before = null;
  for (let i = 0; i <= 90; i++) {
    const q = 10 ** (-9 + i / 5), off = ratio(q), sign = Math.abs(off) <= zero * q ? 0 : Math.sign(off);
    if (i === 0 && sign === 0) return 1 / moments(activation, SMALLEST_Q).slope;
    if (before && before.sign * sign < 0) {
      const root = rootBetween(ratio, before.q, q), { slope } = moments(activation, root), h = 1e-4 * root;
      const growth = (moments(activation, root + h).value - moments(activation, root - h).value) / (2 * h);
      if (growth / slope <= 1 + 1e-6) return 1 / slope;
    }
    before = { q, sign };
  }
  return NaN;
}
