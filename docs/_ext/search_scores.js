// Scores of the site's search. Guides come before measurements and the reference of internals.
// The guide that explains a common word comes first, although other pages use the word too.
var GUIDES = {
  checkpoint: "how_to", resume: "how_to", penalty: "how_to", penalties: "how_to", maml: "how_to",
  simplex: "geometry", box: "geometry", "error estimate": "solvers", converged: "solvers",
  nan: "troubleshooting", "out of memory": "troubleshooting", deadlock: "troubleshooting",
  verdict: "benchmarks", reproduced: "benchmarks", certificate: "kernels", darts: "spaces",
  "own images": "own_data", "own data": "own_data",
};
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
    const query = new URLSearchParams(location.search).get("q") || "";
    if (kind !== "object" && page === GUIDES[query.trim().toLowerCase()]) return score + 50;
    const guide = !/^(api|gallery)\/|^(benchmarks|contributing|deep_search|errata|gallery|theory|train_free)$/.test(page);
    if (kind === "title" && guide) return score + 20; // the query is half of a heading or more
    return guide ? score : score / 2;
  },
};
