// The chosen head in words and numbers: its roles, and where its weight lies.

function drawAbout() {
  const box = $("about");
  if (state.cell && layer().drawn === "matrix") { drawHow(box); return; }
  const of = layer(), place = state.head, cards = cardsOf(of, place);
  const parts = [el("div", { class: "head" }, el("h2", {}, el("span", { class: "name" }, headName()), ` head ${of.heads[place]} of layer ${of.number}`))];
  parts.push(el("p", { class: "hint where" }, [of.name, of.over === "Dense()" || of.kind === "graph" ? null : of.over, of.score === "Dot" ? null : `${of.score} score`].filter(Boolean).join(" · ")));
  if (cards.length) parts.push(...cards.map(drawCard));
  else if (record.cards.length || !of.image) parts.push(el("p", { class: "norole" }, el("b", {}, "No role: "), record.cards.length ? "nothing stands out in this head." : "none was looked for."));
  if (of.kind === "graph") parts.push(...nodeParts(of, place));
  parts.push(...statistics(of, place));
  if (of.image && of.queries > of.image.special[0]) parts.push(...drawSurroundings(of, place));
  box.replaceChildren(...parts);
}

function drawCard(card) {
  const pin = (x) => `${(100 * Math.min(1, Math.max(0, x))).toFixed(1)}%`;
  const facts = [
    [number(card.score), `95 % interval ${number(card.low)}–${number(card.high)}`],
    [number(card.baseline), "baseline on the same cases"],
    [card.cases.toLocaleString("en"), card.cases === 1 ? "case" : "cases"],
    card.effect === null ? null : [signedNumber(card.effect), "effect of removing the head"],
  ].filter(Boolean);
  return el("article", { class: "card", style: `--role:${roleColour(card.role)};--line:${roleLine(card.role)}` },
    el("h3", {}, card.role),
    record.roles[card.role] ? el("p", {}, record.roles[card.role]) : null,
    el("div", { class: "gauge", role: "img", "aria-label": `score ${number(card.score)}, baseline ${number(card.baseline)}` },
      el("span", { class: "reach", style: `left:${pin(card.low)};right:${pin(1 - card.high)}` }),
      el("span", { class: "base", style: `left:${pin(card.baseline)}`, title: "baseline" }),
      el("span", { class: "dot", style: `left:${pin(card.score)}`, title: "score" })),
    el("dl", {}, facts.flatMap(([value, name]) => [el("dt", {}, value), el("dd", {}, name)])),
    card.pair ? el("p", { class: "pair" }, "Here: ", token(card.pair[0]), " → ", token(card.pair[1]), ` ${number(card.pair[2])}`) : null);
}

const signedNumber = (x) => (Math.abs(x) < 5e-4 ? "0" : `${x > 0 ? "+" : "−"}${Math.abs(x).toFixed(Math.abs(x) < 0.1 ? 3 : 2)}`);

const ON = [
  ["self", "itself", "Weight that a token puts on itself"],
  ["previous", "previous", "Weight on the token before"],
  ["next", "next", "Weight on the token after"],
  ["first", "first token", "Weight on the first token"],
  ["special", "special tokens", "Weight on tokens such as [CLS] and [SEP]"],
];

function statistics(of, place) {
  const { entropy, distance, weight, share } = of.stats;
  const text = of.columns === null ? null : record.texts[of.columns];
  const special = text?.word_of.some((word) => word === null);
  const bar = (x, kind) => el("span", { class: `meter ${kind}`, style: `--long:${(100 * Math.min(1, x ?? 0)).toFixed(1)}%` });
  const rows = ON.filter(([name]) => weight[name] && (name !== "special" || special) && (of.kind !== "cross" || name === "first" || name === "special")).map(([name, words, help]) => {
    const w = weight[name][place], c = share[name]?.[place];
    return el("tr", { title: help }, el("th", { scope: "row" }, words), el("td", { class: "bars" }, bar(w, "w"), c === undefined ? null : bar(c, "c")),
      el("td", {}, percent(w)), c === undefined ? null : el("td", { class: "c" }, percent(c)));
  });
  // where no query is a patch there is nothing to average
  if (of.image && entropy[place] === null) return [];
  const keys = Math.exp(entropy[place] ?? 0);
  const both = Object.keys(share).length > 0;
  return [
    !rows.length ? "" : el("table", { class: "stats" }, el("caption", {}, of.kind === "graph" ? "Where the weight lies, on average" : of.image ? "Where the patches look, on average" : "Where the words look, on average"),
      el("thead", {}, el("tr", {}, el("td"), el("td"), el("th", { scope: "col", class: "w" }, "weight"), both ? el("th", { scope: "col", class: "c" }, "contrib.") : null)),
      el("tbody", {}, rows)),
    el("dl", { class: "facts" },
      el("dt", {}, number(entropy[place])), el("dd", {}, `nats of entropy: as if spread evenly over ${keys < 9.95 ? keys.toFixed(1) : Math.round(keys)} ${of.kind === "graph" ? "nodes" : of.image && !of.image.special[1] ? "patches" : "tokens"}`),
      ...(of.image ? aimed(of, place) : distance && of.kind === "self" ? [el("dt", {}, number(distance[place], 1)), el("dd", {}, "tokens away on average")] : [])),
  ];
}

watch("layer head cell measure level hide theme node direction", (keys) => { if (!layer().image || [...keys].some((key) => key !== "node" && key !== "direction")) drawAbout(); });
