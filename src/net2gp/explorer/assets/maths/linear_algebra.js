// Dense symmetric matrices as Float64Array, row by row.

// The lower factor of A + jitter·I; null where a pivot is not positive
function choleskyOnce(A, size, jitter) {
  const L = new Float64Array(size * size);
  for (let i = 0; i < size; i++) {
    for (let j = 0; j <= i; j++) {
      let sum = A[i * size + j] + (i === j ? jitter : 0);
      for (let k = 0; k < j; k++) sum -= L[i * size + k] * L[j * size + k];
      if (i === j) {
        if (!(sum > 0)) return null;
        L[i * size + i] = Math.sqrt(sum);
      } else L[i * size + j] = sum / L[j * size + j];
    }
  }
  return L;
}

// As above, with ten times more jitter each time it fails, from 1e-12 of the mean diagonal
function cholesky(A, size, jitter = 0) {
  let trace = 0;
  for (let i = 0; i < size; i++) trace += A[i * size + i] / size;
  for (let extra = 0; extra <= 1e-2; extra = extra ? extra * 10 : 1e-12) {
    const L = choleskyOnce(A, size, jitter + extra * trace);
    if (L) return L;
  }
  return null;
}

// L⁻¹ b, in place
function forwardSolve(L, size, b) {
  for (let i = 0; i < size; i++) {
    let sum = b[i];
    for (let k = 0; k < i; k++) sum -= L[i * size + k] * b[k];
    b[i] = sum / L[i * size + i];
  }
  return b;
}

// L⁻ᵀ b, in place
function backwardSolve(L, size, b) {
  for (let i = size - 1; i >= 0; i--) {
    let sum = b[i];
    for (let k = i + 1; k < size; k++) sum -= L[k * size + i] * b[k];
    b[i] = sum / L[i * size + i];
  }
  return b;
}

function dot(a, b, size, from = 0, other = 0) {
  let sum = 0;
  for (let i = 0; i < size; i++) sum += a[from + i] * b[other + i];
  return sum;
}

// A v for a matrix with `rows` rows
function times(A, rows, columns, v) {
  const result = new Float64Array(rows);
  for (let i = 0; i < rows; i++) result[i] = dot(A, v, columns, i * columns);
  return result;
}

function identity(size) {
  const I = new Float64Array(size * size);
  for (let i = 0; i < size; i++) I[i * size + i] = 1;
  return I;
}

// Rows p and q of A turned by the angle with cosine c and sine s
function turnRows(A, size, p, q, c, s) {
  for (let k = 0, i = p * size, j = q * size; k < size; k++, i++, j++) {
    const a = A[i], b = A[j];
    A[i] = c * a - s * b;
    A[j] = s * a + c * b;
  }
}

// Jacobi's method: A = Vᵀ diag(values) V, where the rows of `vectors` are eigenvectors
function eigen(matrix, size) {
  const A = matrix.slice(), V = identity(size);
  let scale = 0;
  for (let i = 0; i < size * size; i++) scale = Math.max(scale, Math.abs(A[i]));
  for (let sweep = 0, turned = true; turned && sweep < 30; sweep++) {
    const small = Math.max(sweep < 2 ? 0.01 ** (sweep + 1) : 0, 1e-15) * scale;
    turned = sweep < 2;
    for (let p = 0; p < size; p++) {
      for (let q = p + 1; q < size; q++) {
        const off = A[p * size + q];
        if (Math.abs(off) < small) continue;
        turned = true;
        const half = (A[q * size + q] - A[p * size + p]) / (2 * off);
        const t = (half >= 0 ? 1 : -1) / (Math.abs(half) + Math.hypot(1, half));
        const c = 1 / Math.sqrt(1 + t * t), s = t * c;
        rotate(A, size, p, q, c, s, t * off);
        turnRows(V, size, p, q, c, s);
      }
    }
  }
  return { values: Float64Array.from({ length: size }, (_, i) => A[i * size + i]), vectors: V };
}

// A ← R A Rᵀ, which makes the entry (p, q) zero and moves `shift` from one diagonal entry to the other
function rotate(A, size, p, q, c, s, shift) {
  const app = A[p * size + p] - shift, aqq = A[q * size + q] + shift;
  turnRows(A, size, p, q, c, s);
  for (let k = 0; k < size; k++) {
    A[k * size + p] = A[p * size + k];
    A[k * size + q] = A[q * size + k];
  }
  A[p * size + p] = app;
  A[q * size + q] = aqq;
  A[p * size + q] = A[q * size + p] = 0;
}

// Independent standard normal numbers from a seed, the same for everyone who has the link
function makeNormals(seed) {
  let state = (seed * 2654435761 + 88675123) >>> 0, spare = null;
  const uniform = () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let z = state;
    z = Math.imul(z ^ (z >>> 15), z | 1);
    z ^= z + Math.imul(z ^ (z >>> 7), z | 61);
    return ((z ^ (z >>> 14)) >>> 0) / 4294967296;
  };
  const normal = () => {
    if (spare !== null) {
      const kept = spare;
      spare = null;
      return kept;
    }
    const radius = Math.sqrt(-2 * Math.log(1 - uniform())), angle = TWO_PI * uniform();
    spare = radius * Math.sin(angle);
    return radius * Math.cos(angle);
  };
  normal.uniform = uniform;
  return normal;
}
