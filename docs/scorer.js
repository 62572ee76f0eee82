// How the search box orders its results: guides and messages of errors before pages for contributors. Sphinx takes the
// whole object; all but `score` is its default.
var Scorer = {
  score: ([page, _title, _anchor, _text, score]) =>
    score + (/^(howto\/|from-|reference\/errors)/.test(page) ? 2 : /^(project\/|design|protocol)/.test(page) ? -8 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
