// Scores of the site's search. Guides come before measurements and the reference of internals.
var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
  score: ([page, title, anchor, description, score, file, kind]) => {
    const guide = !/^(api|gallery)\/|^(benchmarks|contributing|deep_search|errata|gallery|theory|train_free)$/.test(page);
    if (kind === "title" && guide) return score + 20; // the query is half of a heading or more
    return guide ? score : score / 2;
  },
};
