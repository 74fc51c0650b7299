// Explanations: do they argue for the answer that was given, and which are furthest from the reference.

function explanations() {
  const found = R.explanations;
  if (!found) return;
  const percent = (part, whole) => whole ? `${(100 * part / whole).toFixed(1)}%` : "–";
  const own = name => found.reference_treated == null ? "" : ` (${name}: ${found.reference_treated.toFixed(1)}%)`;
  const agreeing = found.concluding - found.conflicting;
  const lines = [
    {cells: [both("argues for the answer", "与所答一致"), count(agreeing), percent(found.agreeing_right, agreeing)]},
    {cells: [both("argues for another letter", "与所答矛盾"), count(found.conflicting), percent(found.conflicting_right, found.conflicting)], go: {conflicts: true}},
  ];
  const worst = overall.explanations ? `<button class="link" data-go="${escape(JSON.stringify({sort: "rougeL"}))}">${both("lowest ROUGE-L first", "按 ROUGE-L 从低到高查看")}</button>` : "";
  section("explanations", "Explanations", "解析", `<p class="soft">${both(
    `${count(found.explained)} outputs hold an explanation; ${count(found.concluding)} of them conclude with a letter (such as 故选C). They name ${found.treated.toFixed(1)}% of their question's options${own("the exam's own explanations")}; ${count(found.treat_all)} name every option.`,
    `${count(found.explained)} 条输出含有解析，其中 ${count(found.concluding)} 条给出了结论选项（如“故选C”）。平均提到题目 ${found.treated.toFixed(1)}% 的选项${own("考试自带解析")}，${count(found.treat_all)} 条提到全部选项。`)}</p>
    ${table(["", both("outputs", "条数"), both("of these right", "其中答对")], lines, {sortable: false})}<p>${worst}</p>`);
}

explanations();
