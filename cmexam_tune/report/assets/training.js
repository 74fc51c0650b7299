// Curves of the training run, where its log lay beside the predictions.

const COLORS = ["var(--main)", "#d1741f", "var(--good)"];
// The figures of a training that have at least one curve, each curve as [name in the log, words, color].
const figures = () => R.figures.map(({key, title, names}) => ({
  key, title, curves: Object.entries(names).map(([name, words], i) => [name, both(...words), COLORS[i]]).filter(([name]) => R.training[name]),
})).filter(({curves}) => curves.length);

function drawTraining() {
  for (const {key, curves} of figures()) {
    const box = byId(`curve-${key}`);
    if (box) drawCurves(box, curves.map(([name, words, color]) => ({name: words, color, points: R.training[name]})), word("steps", "步"));
  }
}

function training() {
  if (!R.training) return;
  const parts = figures().map(({key, title, curves}) => {
    const names = curves.length > 1 ? `<p class="legend">${curves.map(([, words, color]) => `<span><i class="mark" style="background:${color}"></i> ${words}</span>`).join("")}</p>` : "";
    return `<div><h3>${both(...title)}</h3>${names}<div class="curve" id="curve-${key}"></div></div>`;
  });
  section("training", "Training", "训练过程", `<div class="curves">${parts.join("")}</div>`);
  new ResizeObserver(drawTraining).observe(byId("training"));
}

training();
