// Activations without a closed form. With φ(√q z) = √V(q) Σ_n b_n(q) h_n(z) in orthonormal Hermite polynomials,
// E[φ(u)φ(v)] = √(V(p)V(q)) Σ_n b_n(p) b_n(q) ρⁿ, and the derivative in the covariance is E[φ'(u)φ'(v)]. Tables
// hold b_n, log V and log E[φ'²] as Chebyshev series in log q. What the kept terms leave at ρ = 1 is one more
// power of ρ, whose size and exponent make value and slope at ρ = 1 exact.

function decodeFloats(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  return new Float32Array(bytes.buffer);
}

// Where the powers begin to grow by two, and where 1 is among them
function evenlySpaced(powers) {
  let first = powers.length - 1;
  while (first > 0 && powers[first] - powers[first - 1] === 2) first -= 1;
  return { first, linear: powers.indexOf(1) };
}

function makeTable(raw) {
  const rows = decodeFloats(raw.values), degree = raw.degree;
  const powers = Float64Array.from(raw.powers), { first, linear } = evenlySpaced(raw.powers);
  return { ...raw, rows, degree, powers, first, linear, smallest: raw.low, largest: raw.high, low: Math.log(raw.low), high: Math.log(raw.high), cache: new Map() };
}

function chebyshevBasis(table, q, basis) {
  const at = Math.min(Math.max(Math.log(q), table.low), table.high);
  const x = (2 * (at - table.low)) / (table.high - table.low) - 1;
  basis[0] = 1;
  basis[1] = x;
  for (let n = 2; n < table.degree; n++) basis[n] = 2 * x * basis[n - 1] - basis[n - 2];
}

const TINY = 1e-100; // stands for a variance of zero, by which slopes are divided

const BASIS = new Float64Array(128);

// A row of the table at the variance whose basis was computed last
function tableRow(table, row) {
  let sum = 0;
  for (let n = 0, i = row * table.degree; n < table.degree; n++, i++) sum += table.rows[i] * BASIS[n];
  return sum;
}

// E[φ²] and E[φ'²]. Below the table φ is the line φ(0) + φ'(0) u; above it they are powers of q
function tableMoments(table, q, out) {
  const count = table.powers.length, over = Math.max(q / table.largest, 1);
  chebyshevBasis(table, q, BASIS);
  out[0] = Math.exp(tableRow(table, count)) * over ** table.growth[0];
  out[1] = Math.exp(tableRow(table, count + 1)) * over ** table.growth[1];
  if (table.vanishes) out[0] *= Math.min(q / table.smallest, 1);
}

const MOMENTS = new Float64Array(2);

// {variance, slope, coefficients, rest, exponent} at one variance, remembered since points share them
function tableAt(table, given) {
  const q = Math.max(given, TINY);
  let found = table.cache.get(q);
  if (found) return found;
  if (table.cache.size > 4000) table.cache.clear();
  tableMoments(table, q, MOMENTS);
  const [variance, slope] = MOMENTS, count = table.powers.length, sums = new Float64Array(count);
  for (let r = 0; r < count; r++) sums[r] = tableRow(table, r);
  let kept = 0, weighted = 0;
  for (let r = 0; r < count; r++) {
    kept += sums[r] ** 2;
    weighted += table.powers[r] * sums[r] ** 2;
  }
  let last = count - 1;
  while (last > table.first && Math.abs(sums[last]) < 1e-9) last -= 1;
  const rest = Math.max(1 - kept, 0), missing = (slope * q) / variance - weighted;
  const highest = table.powers[count - 1], tail = rest > 1e-7 && missing > highest * rest;
  found = { q, variance, slope, coefficients: sums, count: last + 1, rest: tail ? rest : 0,
    exponent: tail ? missing / rest : highest };
  table.cache.set(q, found);
  return found;
}

function tableDual(table) {
  return (k, one, two, out) => {
    const scale = Math.sqrt(one.q * two.q), rho = Math.min(Math.max(k / scale, -1), 1), powers = table.powers;
    const square = rho * rho, limit = Math.abs(rho) < 0.999 ? 2 - 30 / Math.log(Math.abs(rho) + 1e-300) : 1e9;
    const a = one.coefficients, b = two.coefficients, end = Math.min(one.count, two.count), first = table.first;
    let value = 0, weighted = 0;
    for (let r = 0; r < first; r++) {
      const term = a[r] * b[r] * rho ** powers[r];
      value += term;
      weighted += powers[r] * term;
    }
    let power = rho ** powers[first];
    for (let r = first; r < end && powers[r] < limit; r++) {
      const term = a[r] * b[r] * power;
      value += term;
      weighted += powers[r] * term;
      power *= square;
    }
    // at ρ = 0 only the linear term has a slope
    let slope = rho === 0 ? a[table.linear] * b[table.linear] : weighted / rho;
    const rest = Math.sqrt(one.rest * two.rest);
    if (rest > 0 && rho !== 0) {
      const n = Math.sqrt(one.exponent * two.exponent), tail = rest * Math.abs(rho) ** n;
      const sign = rho < 0 && table.odd ? -1 : 1;
      value += sign * tail;
      slope += (sign * n * tail) / rho;
    }
    const size = Math.sqrt(one.variance * two.variance);
    out[0] = size * value;
    out[1] = (size * slope) / scale;
  };
}

function tableVariance(table) {
  return (q, out) => {
    tableMoments(table, Math.max(q, TINY), out);
  };
}

const TABLE_FUNCTIONS = {
  tanh: ["tanh", "nn.Tanh()", Math.tanh, (u) => 1 - Math.tanh(u) ** 2],
  silu: ["SiLU", "nn.SiLU()", (u) => u * sigmoid(u), (u) => sigmoid(u) * (1 + u * (1 - sigmoid(u)))],
  softplus: ["softplus", "nn.Softplus()", (u) => Math.max(u, 0) + Math.log1p(Math.exp(-Math.abs(u))), sigmoid],
};

// `prepare` looks up a variance once for all of its pairs, which `preparedDual` takes in its place
function activationFrom(preparedDual, prepare, variance, rest) {
  const dual = (k, p, q, out) => preparedDual(k, prepare(p), prepare(q), out);
  return { ...rest, exact: false, preparedDual, prepare, dual, variance };
}

// σ(u) = (1 + tanh(u/2))/2, so it needs no table of its own
function sigmoidFrom(tanh) {
  const shrink = (out) => { out[0] = (1 + out[0]) / 4; out[1] /= 16; };
  const preparedDual = (k, one, two, out) => { tanh.preparedDual(k / 4, one, two, out); shrink(out); };
  const variance = (q, out) => { tanh.variance(q / 4, out); shrink(out); };
  return activationFrom(preparedDual, (q) => tanh.prepare(q / 4), variance,
    { label: "sigmoid", code: "nn.Sigmoid()", apply: sigmoid, slope: (u) => sigmoid(u) * sigmoid(-u) });
}

function loadTables(raw) {
  for (const [name, [label, code, apply, slope]] of Object.entries(TABLE_FUNCTIONS)) {
    const table = makeTable(raw[name]);
    ACTIVATIONS[name] = activationFrom(tableDual(table), (q) => tableAt(table, q), tableVariance(table),
      { label, code, apply, slope });
  }
  ACTIVATIONS.sigmoid = sigmoidFrom(ACTIVATIONS.tanh);
}
