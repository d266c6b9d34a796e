// The lines of net2gp that compute what the page shows.

function pythonNetwork({ depth, activation, norm, skip }, width) {
  const { code } = ACTIVATIONS[activation], n = width === Infinity ? 64 : width, lines = [`    nn.Linear(1, ${n}),`];
  for (let l = 0; l < depth; l++) {
    const last = l === depth - 1, inner = [...(norm ? [`nn.LayerNorm(${n})`] : []), code, `nn.Linear(${n}, ${last ? 1 : n})`];
    if (skip && !last) lines.push(`    Residual(${inner.join(", ")}),`);
    else lines.push(`    ${inner.join(", ")},`);
  }
  return ["network = nn.Sequential(", ...lines, ").double()"];
}

const RESIDUAL = ["", "", "class Residual(nn.Sequential):", "    def forward(self, x):", "        return x + super().forward(x)", "", ""];

function pythonCode(state, result) {
  const { weightVar, biasVar, noise, points, mode, activation, steps, width } = state, residual = state.skip && state.depth > 1;
  const list = (values) => `torch.tensor([${values.join(", ")}]).double()[:, None]`;
  const code = ["import torch", "from torch import nn", "", "import net2gp as n2g"];
  if (ACTIVATIONS[activation].code.startsWith("modules.")) code.push("from net2gp.limits import modules");
  code.push(...(residual ? RESIDUAL : [""]), ...pythonNetwork(netOf(state), width));
  code.push(`variances = {"weight_var": ${weightVar}, "bias_var": ${biasVar}}`);
  code.push("new = torch.linspace(-3, 3, 161).double()[:, None]");
  if (mode !== "prior" && points.length) code.push(`x = ${list(points.map((p) => p[0]))}`, `y = ${list(points.map((p) => p[1]))}`);
  code.push("");
  if (mode === "training" && points.length) {
    code.push(`flow = n2g.gradient_flow(network, (x, y), learning_rate=${result.rate}, **variances)`, `law = flow.at(${steps}, new)`);
    if (width !== Infinity) code.push("trained = n2g.limits.twin(network, " + `${width}, **variances)  # a start; train it by gradient descent`);
  } else {
    code.push(`kernel = n2g.${"nngp"}(network, **variances)`);
    if (mode === "prior" || !points.length) {
      code.push("law = torch.distributions.Normal(0.0, kernel.diag(new).sqrt())");
      if (width !== Infinity) code.push(`drawn = n2g.limits.twin(network, ${width}, **variances)(new)`);
    } else {
      code.push(`posterior = n2g.condition(kernel, (x, y), n2g.Gaussian(${noise}))`, "law = posterior.marginal(new)",
        "evidence = posterior.log_marginal_likelihood()");
    }
  }
  code.push("law.mean, law.stddev");
  return code.join("\n");
}

function makePython(explorer) {
  const holder = byId("python"), button = byId("copy");
  button.addEventListener("click", async () => {
    const text = holder.textContent;
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(holder);
      button.textContent = "Selected: press Ctrl+C";
    }
    setTimeout(() => { button.textContent = "Copy as Python"; }, 2000);
  });
  return (state, result) => { holder.textContent = pythonCode(state, result); };
}
