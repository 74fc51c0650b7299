// Who this is, and the number that everybody looks for first.

const APART = ["n", "accuracy", "accuracy_ci", "answered"];  // said in words of their own

function identityList() {
  const who = R.identity;
  if (!who) return "";
  const facts = [
    [both("Model", "模型"), who.model && escape(who.model)],
    [both("Fine-tuned", "微调"), escape([who.method, who.adapter].filter(Boolean).join(": "))],
    [both("Data", "数据"), escape(`${who.questions || ""} (n = ${count(who.n)})`)],
    [both("Prompt", "提示"), described([who.prompt, who.mode].filter(Boolean).join(", "))],
    [both("Scored by", "评分规则"), escape(who.profile)],
    [both("Date", "日期"), escape(who.date)],
  ];
  return `<dl class="who">${facts.filter(([, text]) => text).map(([name, text]) => `<div><dt>${name}</dt><dd>${text}</dd></div>`).join("")}</dl>`;
}

function accuracySentence() {
  const interval = overall.accuracy_ci, scored = count(overall.scored ?? overall.n);
  if (!interval) return both("The answers of these questions are not published, so there is no accuracy.", "这些题目的答案未公布，因此没有正确率。");
  const ends = interval.map(end => end.toFixed(1));
  return both(
    `${number(overall.accuracy)}% of ${scored} questions with a known answer were answered right. With ${scored} questions, accuracies between <b>${ends[0]}% and ${ends[1]}%</b> are compatible with this result (95% Wilson interval). A question with several right letters counts only when exactly these were given.`,
    `在 ${scored} 道有标准答案的题目中答对 ${number(overall.accuracy)}%。按此题量，与该结果相容的真实正确率在 <b>${ends[0]}% 至 ${ends[1]}%</b> 之间（95% Wilson 区间）。多选题须全部选对且不多选才算对。`);
}

// Only a part of the questions, or outputs that a limit cut off: to be known before the numbers.
function caveats() {
  const part = R.selection, cut = R.cut && R.cut[R.name], found = [];
  if (part) found.push(both(`Only ${count(part.n)} of ${count(part.of)} questions are scored: ${escape(part.how)}.`, `仅对 ${count(part.of)} 道题中的 ${count(part.n)} 道计分：${escape(part.how)}。`));
  if (cut && cut.cut) found.push(both(`${count(cut.cut)} of ${count(cut.outputs)} outputs reached generation.max_new_tokens and were cut${cut.thinking ? `, ${count(cut.thinking)} of them while thinking` : ""}; raise it.`, `${count(cut.outputs)} 条输出${cut.cut === cut.outputs ? "全部" : `中有 ${count(cut.cut)} 条`}因长度上限被截断${cut.thinking ? `（其中 ${count(cut.thinking)} 条仍在思考）` : ""}，请调大 generation.max_new_tokens。`));
  const mode = R.identity && R.identity.mode;
  if (mode === "first-letter" || mode === "constrained-words") found.push(both(`Answers were read in the way <b>${mode}</b>, because the server does not let an answer's first words be given. They are not comparable with likelihood or constrained answers of local models.`, `服务器不支持给定回答的开头，因此按 <b>${mode}</b> 方式读取答案，与本地模型的 likelihood 或 constrained 结果不可比。`));
  return found.map(text => `<p class="warning">${text}</p>`).join("");
}

function textSentence() {
  if (!overall.explanations) return "";
  const n = count(overall.explanations);
  return both(
    ` BLEU and ROUGE (0 to 100) measure how far the wording of ${n} explanations overlaps with the reference, not whether an explanation is medically right.`,
    `BLEU 与 ROUGE（0–100）衡量 ${n} 条解析与参考解析在字面上的重合程度，不代表医学上是否正确。`);
}

// Questions with several right letters: the exact score beside credit for a part of them.
function letters() {
  if (!R.partial_credit.multiple) return "";
  const names = {all: ["all", "全部"], single: ["one right letter", "单选"], multiple: ["several right letters", "多选"]};
  const lines = Object.entries(R.partial_credit).map(([key, one]) => ({cells: [both(...names[key]), count(one.n), ...["accuracy", "jaccard", "precision", "recall"].map(name => number(one[name]))]}));
  return table(["", both("Questions", "题数"), both("Exact %", "完全正确 %"), "Jaccard %", both("Precision of letters %", "选项精确率 %"), both("Recall of letters %", "选项召回率 %")], lines, {sortable: false, wide: [4, 5]});
}

function headline() {
  const fact = (key, title, value) => {
    const interval = R.intervals[key] ? `<small>${number(R.intervals[key])}</small>` : "";
    return `<div class="fact"><b>${value}</b>${title}${interval}</div>`;
  };
  const facts = [
    fact("answered", both("readable outputs", "可解析的输出"), overall.n ? `<span class="nowrap">${count(overall.answered)}<small> / ${count(overall.n)}</small></span>` : "–"),
    ...shownColumns.filter(key => !APART.includes(key)).map(key => fact(key, heading(key), number(overall[key], key))),
  ];
  section("headline", escape(R.name === "this run" ? "Result" : R.name), escape(R.name === "this run" ? "结果" : R.name), `${identityList()}${caveats()}
    <div class="top"><div><div class="big">${number(overall.accuracy)}<small>%</small></div><div>${both("answered exactly right", "完全答对")}</div></div>${facts.join("")}</div>
    <p class="lead">${accuracySentence()}${textSentence()}</p>${letters()}`);
}

headline();
