// How the search ranks pages: the course and the guide before the API, and what is of C++ last.
var Scorer = {
  score: ([page, title, anchor, descr, score, file, kind]) => {
    const places = [
      ["notebooks/", 8], ["docs/api/cpp/", -12], ["docs/api/python/cpp", -6], ["docs/api/python/reference", -6],
      ["docs/api/", 0], ["docs/", 5],
    ];
    const place = places.find(([folder]) => page.startsWith(folder));
    return score + (place ? place[1] : 0);
  },
  // Sphinx's own numbers
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
