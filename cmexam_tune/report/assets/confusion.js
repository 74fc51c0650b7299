// Which letter was answered for which.

function confusion() {
  const {gold, predicted, counts} = R.confusion;
  if (!gold || !gold.length) return;
  const name = letter => ({several: both("several", "多选"), unreadable: both("unreadable", "无法解析")})[letter] || escape(letter);
  const lines = counts.map((line, i) => {
    const sum = line.reduce((a, b) => a + b, 0) || 1;
    const cells = line.map((value, j) => {
      const hit = gold[i] === predicted[j] && gold[i] !== "several" ? "hit" : "";
      const go = escape(JSON.stringify({cell: [gold[i], predicted[j]]}));
      return `<td data-go="${go}" class="${hit}" style="background:rgba(var(--heat),${(value / sum * 0.85).toFixed(3)})" title="${(value / sum * 100).toFixed(1)}%">${value}</td>`;
    });
    return `<tr><th>${name(gold[i])}</th>${cells.join("")}</tr>`;
  });
  section("confusion", "Confusion matrix", "混淆矩阵", `<p class="soft">${both(
    "Rows: correct answer; columns: model's answer. A dark column outside the diagonal means the model favours that letter. Click a number to see the questions.",
    "行为标准答案，列为模型所答。描边对角线以外的深色列说明模型偏好该选项。点击数字可查看题目。")}</p>
    <div class="scroll"><table class="heat"><thead><tr><th></th>${predicted.map(letter => `<th>${name(letter)}</th>`).join("")}</tr></thead><tbody>${lines.join("")}</tbody></table></div>`);
}

confusion();
