// Curves of the training run, where its log lay beside the predictions.

const CURVES = [
  ["loss", both("Loss", "损失"), [["loss", both("training", "训练"), "var(--main)"], ["eval_loss", both("validation", "验证"), "#d1741f"]]],
  ["accuracy", both("Exam accuracy while training, %", "训练过程中的考试正确率（%）"), [["eval_exam_accuracy", "", "var(--good)"]]],
  ["rate", both("Learning rate", "学习率"), [["learning_rate", "", "var(--main)"]]],
];

function drawTraining() {
  for (const [id, , curves] of CURVES) {
    const box = byId(`curve-${id}`);
    const known = curves.filter(([key]) => R.training[key]).map(([key, name, color]) => ({name, color, points: R.training[key]}));
    if (box && known.length) drawCurves(box, known, word("steps", "步"));
  }
}

function training() {
  if (!R.training) return;
  const parts = CURVES.map(([id, title, curves]) => {
    const known = curves.filter(([key]) => R.training[key]);
    if (!known.length) return "";
    const names = known.length > 1 ? `<p class="legend">${known.map(([, name, color]) => `<span><i class="mark" style="background:${color}"></i> ${name}</span>`).join("")}</p>` : "";
    return `<div><h3>${title}</h3>${names}<div class="curve" id="curve-${id}"></div></div>`;
  });
  section("training", "Training", "训练过程", `<div class="curves">${parts.join("")}</div>`);
  new ResizeObserver(drawTraining).observe(byId("training"));
}

training();
