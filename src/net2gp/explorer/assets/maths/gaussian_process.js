// Gaussian processes conditioned on data, their evidence, and the law of networks trained by gradient flow.

// Regression with covariances `gram` of N points, `cross` of M points with them, and variances `prior` of the M
// points: {mean, variance, evidence}. The evidence is log N(y | 0, gram + noise·I).
function regress(gram, cross, prior, y, noise) {
  const N = y.length, M = prior.length, L = cholesky(gram, N, noise);
  const alpha = forwardSolve(L, N, Float64Array.from(y));
  const fit = dot(alpha, alpha, N);
  backwardSolve(L, N, alpha);
  const mean = times(cross, M, N, alpha), variance = new Float64Array(M), whitened = new Float64Array(M * N);
  for (let m = 0; m < M; m++) {
    const row = forwardSolve(L, N, whitened.subarray(m * N, (m + 1) * N).fill(0).map((_, n) => cross[m * N + n]));
    whitened.set(row, m * N);
    variance[m] = Math.max(prior[m] - dot(row, row, N), 0);
  }
  return { mean, variance, whitened, evidence: -0.5 * fit - halfLogDet(L, N) - 0.5 * N * Math.log(TWO_PI) };
}

function halfLogDet(L, N) {
  let sum = 0;
  for (let i = 0; i < N; i++) sum += Math.log(L[i * N + i]);
  return sum;
}

// log N(y | 0, gram + noise·I), the covariance having no positive pivot counting as impossible
function logEvidence(gram, y, noise) {
  const N = y.length, L = cholesky(gram, N, noise);
  if (!L) return -Infinity;
  const alpha = forwardSolve(L, N, Float64Array.from(y));
  return -0.5 * dot(alpha, alpha, N) - halfLogDet(L, N) - 0.5 * N * Math.log(TWO_PI);
}

function evidenceOf(net, points, y, noise) {
  return logEvidence(gramKernels(net, diagonals(net, points)).nngp, y, noise);
}

// Functions mean + L z with L Lᵀ = the covariance `gram` of M points, less what `whitened` explains
function drawFunctions(gram, whitened, mean, normals) {
  const M = mean.length, N = whitened ? whitened.length / M : 0, C = gram.slice();
  for (let i = 0; N && i < M; i++) {
    for (let j = 0; j <= i; j++) {
      C[i * M + j] -= dot(whitened, whitened, N, i * N, j * N);
      C[j * M + i] = C[i * M + j];
    }
  }
  let trace = 0;
  for (let i = 0; i < M; i++) trace += gram[i * M + i] / M;
  const L = cholesky(C, M, 1e-9 * trace);
  return normals.map((z) => {
    const f = Float64Array.from(mean);
    for (let i = 0; L && i < M; i++) f[i] += dot(L, z, i + 1, i * M);
    return f;
  });
}

// The flow df/dt = −Θ(·, X)(f(X) − y)/N, with `ridge` on the diagonal of Θ(X, X): its modes
function flowModes(gram, ridge) {
  const N = Math.sqrt(gram.ntk.length), damped = gram.ntk.slice();
  for (let i = 0; i < N; i++) damped[i * N + i] += ridge;
  return { N, ...eigen(damped, N) };
}

// W = Q diag((1 − exp(−λt/N))/λ) Qᵀ, so that f_t(x) = f_0(x) + Θ(x, X) W (y − f_0(X))
function flowWeights(modes, time) {
  const { N, values, vectors } = modes, W = new Float64Array(N * N);
  const floor = 1e-13 * Math.max(...values);
  for (let m = 0; m < N; m++) {
    if (values[m] < floor) continue;
    const weight = time === Infinity ? 1 / values[m] : -Math.expm1((-values[m] * time) / N) / values[m];
    for (let i = 0; i < N; i++) {
      const left = weight * vectors[m * N + i];
      for (let j = 0; j < N; j++) W[i * N + j] += left * vectors[m * N + j];
    }
  }
  return W;
}

// Mean and variance of the infinitely wide ensemble at a time: A = Θ(x, X) W,
// mean A y, variance K(x, x) + A K Aᵀ − 2 A K(X, x)
function flowLaw(gram, cross, prior, y, modes, time) {
  const { N } = modes, M = prior.length, W = flowWeights(modes, time);
  const mean = new Float64Array(M), variance = new Float64Array(M);
  for (let m = 0; m < M; m++) {
    const a = times(W, N, N, cross.ntk.subarray(m * N, (m + 1) * N));
    mean[m] = dot(a, y, N);
    const spread = dot(a, times(gram.nngp, N, N, a), N);
    variance[m] = Math.max(prior[m] + spread - 2 * dot(a, cross.nngp, N, 0, m * N), 0);
  }
  return { mean, variance };
}

// The largest of a function of few variables by the simplex of Nelder and Mead
function maximize(objective, start, step, evaluations) {
  const size = start.length;
  let simplex = [start, ...start.map((_, i) => start.map((v, j) => v + (i === j ? step : 0)))];
  simplex = simplex.map((x) => ({ x, value: objective(x) }));
  const at = (center, worst, factor) => {
    const x = center.map((c, i) => c + factor * (worst.x[i] - c));
    return { x, value: objective(x) };
  };
  for (let used = 0; used < evaluations; used++) {
    simplex.sort((a, b) => b.value - a.value);
    const worst = simplex[size], center = start.map((_, i) => {
      let sum = 0;
      for (let s = 0; s < size; s++) sum += simplex[s].x[i] / size;
      return sum;
    });
    let next = at(center, worst, -1);
    if (next.value > simplex[0].value) {
      const further = at(center, worst, -2);
      if (further.value > next.value) next = further;
    } else if (!(next.value > simplex[size - 1].value)) {
      next = at(center, worst, next.value > worst.value ? -0.5 : 0.5);
    }
    if (next.value > worst.value) simplex[size] = next;
    else {
      const best = simplex[0].x;
      simplex = simplex.map(({ x }) => x.map((v, i) => (v + best[i]) / 2)).map((x) => ({ x, value: objective(x) }));
    }
  }
  return simplex.sort((a, b) => b.value - a.value)[0];
}
