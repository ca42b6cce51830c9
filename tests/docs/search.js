// The pages that the site's search finds: node search.js FOLDER INDEX QUERY..., a line of JSON for each query.
const fs = require("fs"), vm = require("vm");
const [folder, index, ...queries] = process.argv.slice(2);
const context = vm.createContext({
  document: { getElementById: () => null }, window: {}, SPHINX_HIGHLIGHT_ENABLED: false,
  _: (text) => text, _ready: () => {}, queries, found: [],
});
const scripts = ["_static/searchtools.js", "_static/language_data.js", index]; // in the order of the page
const code = scripts.map((file) => fs.readFileSync(`${folder}/${file}`, "utf8")).join("\n");
const asks = "for (const query of queries) found.push(Search._performSearch(...Search._parseQuery(query)))";
vm.runInContext(`${code}\n;var Stemmer = window.Stemmer ?? Stemmer;\n${asks}`, context);
for (const results of context.found) console.log(JSON.stringify([...new Set(results.reverse().map(([page]) => page))]));
