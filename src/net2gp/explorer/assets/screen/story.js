// What the main plot shows, in words, with the numbers that were measured.

const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;

function priorStory(state) {
  if (state.width === Infinity) return "Before any data: functions that networks of infinite width compute with random weights.";
  return `Before any data: ${NUM_LINES} random networks of width ${state.width}. Networks of infinite width are in the band as a Gaussian process is.`;
}

function posteriorStory(state, result, finite) {
  if (!state.points.length) return "There are no data: the posterior is the prior. Double-click into the plot to add a point.";
  if (state.width === Infinity) {
    return "Bayesian inference in an infinitely wide network, exact and without training. Choose a finite width to see networks approach it.";
  }
  if (!finite || !finite.lines.length) return "Drawing networks …";
  const scale = Math.sqrt(Math.max(...result.grid.nngp)), gaps = finite.lines.map((mean) => rootMeanSquare(mean, result.mean));
  const gap = gaps.reduce((a, b) => a + b) / gaps.length;
  return `Each line is the mean of one random network of width ${state.width} whose readout is Bayesian. ` +
    `They are <b>${percent(gap / scale)}</b> of the prior's standard deviation away from the limit.`;
}

function trainingStory(state, result, finite) {
  if (!state.points.length) return "There are no data to train on. Double-click into the plot to add a point.";
  const time = `After ${state.steps} steps at learning rate ${shortNumber(result.rate)}, `;
  if (state.width === Infinity) return `${time}the law of an ensemble of infinitely wide networks, in closed form. Choose a finite width to train real ones beside it.`;
  if (!finite || !finite.lines.length) return "Training networks in the background …";
  if (finite.lines.some((f) => !f.every(Number.isFinite))) return `${time}networks of width ${state.width} have diverged: they are too narrow for a step of this size.`;
  const gaps = finite.lines.map((f, i) => rootMeanSquare(f, predictedPath(result, result.modes, state.steps * result.rate, finite.starts[i])));
  const gap = gaps.reduce((a, b) => a + b) / gaps.length;
  return `${time}${finite.lines.length} networks of width ${state.width} that were really trained are on average <b>${shortNumber(round(gap, 2))}</b> ` +
    "away from where the theory of infinite width takes them from their own start.";
}

function tellStory(state, result, finite) {
  const tell = { prior: priorStory, posterior: posteriorStory, training: trainingStory }[state.mode];
  const html = tell(state, result, finite);
  if (byId("story").innerHTML !== html) byId("story").innerHTML = html;
}
