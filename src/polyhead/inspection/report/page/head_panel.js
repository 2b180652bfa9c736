// The panel of the selected head: its roles, and its mean attention.

function drawAbout() {
  const box = $("about");
  if (state.cell && currentLayer().display === "matrix") { drawExplanation(box); return; }
  const layer = currentLayer(), head = state.head, cards = cardsOf(layer, head);
  const parts = [el("div", { class: "head" }, el("h2", {}, el("span", { class: "name" }, headName()), ` head ${layer.heads[head]} of layer ${layer.number}`))];
  parts.push(el("p", { class: "hint where" }, [layer.name, layer.kind === "graph" ? null : layer.attention, layer.over === "Dense()" || layer.kind === "graph" ? null : layer.over, layer.score === "Dot" ? null : `${layer.score} score`].filter(Boolean).join(" · ")));
  if (cards.length) parts.push(...cards.map(drawCard));
  else if (record.cards.length || !layer.image) parts.push(el("p", { class: "norole" }, el("b", {}, "No role: "), record.cards.length ? "nothing stands out in this head." : "roles were not measured."));
  if (layer.kind === "graph") parts.push(...buildEdgeLists(layer, head));
  parts.push(...buildStatistics(layer, head));
  if (layer.image && layer.queries > layer.image.special[0]) parts.push(...drawOffsets(layer, head));
  box.replaceChildren(...parts);
}

function drawCard(card) {
  const toPercent = (x) => `${(100 * Math.min(1, Math.max(0, x))).toFixed(1)}%`;
  const facts = [
    [formatNumber(card.score), `95 % interval ${formatNumber(card.low)}–${formatNumber(card.high)}`],
    [formatNumber(card.baseline), "baseline on the same cases"],
    [card.cases.toLocaleString("en"), card.cases === 1 ? "case" : "cases"],
    card.effect === null ? null : [formatSigned(card.effect), "effect of removing the head"],
  ].filter(Boolean);
  return el("article", { class: "card", style: `--role:${roleColour(card.role)};--line:${roleLine(card.role)}` },
    el("h3", {}, card.role),
    record.roles[card.role] ? el("p", {}, record.roles[card.role]) : null,
    el("div", { class: "gauge", role: "img", "aria-label": `score ${formatNumber(card.score)}, baseline ${formatNumber(card.baseline)}` },
      el("span", { class: "reach", style: `left:${toPercent(card.low)};right:${toPercent(1 - card.high)}` }),
      el("span", { class: "base", style: `left:${toPercent(card.baseline)}`, title: "baseline" }),
      el("span", { class: "dot", style: `left:${toPercent(card.score)}`, title: "score" })),
    el("dl", {}, facts.flatMap(([value, name]) => [el("dt", {}, value), el("dd", {}, name)])),
    card.pair ? el("p", { class: "pair" }, "In this text: ", token(card.pair[0]), " → ", token(card.pair[1]), ` ${formatNumber(card.pair[2])}`) : null);
}

const formatSigned = (x) => (Math.abs(x) < 5e-4 ? "0" : `${x > 0 ? "+" : "−"}${Math.abs(x).toFixed(Math.abs(x) < 0.1 ? 3 : 2)}`);

const TARGETS = [
  ["self", "itself", "Weight of a token on itself"],
  ["previous", "previous", "Weight on the token before it"],
  ["next", "next", "Weight on the token after it"],
  ["first", "first token", "Weight on the first token"],
  ["special", "special tokens", "Weight on tokens such as [CLS] and [SEP]"],
];

function buildStatistics(layer, head) {
  const { entropy, distance, weight, share } = layer.stats;
  const text = layer.columns === null ? null : record.texts[layer.columns];
  const special = text?.word_of.some((word) => word === null);
  const bar = (x, kind) => el("span", { class: `meter ${kind}`, style: `--long:${(100 * Math.min(1, x ?? 0)).toFixed(1)}%` });
  const rows = TARGETS.filter(([name]) => weight[name] && (name !== "special" || special) && (layer.kind !== "cross" || name === "first" || name === "special")).map(([name, label, help]) => {
    const w = weight[name][head], c = share[name]?.[head];
    return el("tr", { title: help }, el("th", { scope: "row" }, label), el("td", { class: "bars" }, bar(w, "w"), c === undefined ? null : bar(c, "c")),
      el("td", {}, formatPercent(w)), c === undefined ? null : el("td", { class: "c" }, formatPercent(c)));
  });
  // means are over patches: there are none if no query is a patch
  if (layer.image && entropy[head] === null) return [];
  const keys = Math.exp(entropy[head] ?? 0);
  const hasShares = Object.keys(share).length > 0;
  return [
    !rows.length ? "" : el("table", { class: "stats" }, el("caption", {}, layer.kind === "graph" ? "Mean attention of the nodes" : layer.image ? "Mean attention of the patches" : "Mean attention of the words"),
      el("thead", {}, el("tr", {}, el("td"), el("td"), el("th", { scope: "col", class: "w" }, "weight"), hasShares ? el("th", { scope: "col", class: "c" }, "contrib.") : null)),
      el("tbody", {}, rows)),
    el("dl", { class: "facts" },
      el("dt", {}, formatNumber(entropy[head])), el("dd", {}, `nats of entropy, like uniform attention over ${keys < 9.95 ? keys.toFixed(1) : Math.round(keys)} ${layer.kind === "graph" ? "nodes" : layer.image && !layer.image.special[1] ? "patches" : "tokens"}`),
      ...(layer.image ? buildImageFacts(layer, head) : distance && layer.kind === "self" ? [el("dt", {}, formatNumber(distance[head], 1)), el("dd", {}, "mean attention distance, in tokens")] : [])),
  ];
}

watch("layer head cell measure level hide theme node direction", (keys) => { if (!currentLayer().image || [...keys].some((key) => key !== "node" && key !== "direction")) drawAbout(); });
