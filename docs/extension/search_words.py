"""Words that readers type into the search, by the notebook that answers them. The words are main entries of the index,
which the search puts first."""

from sphinx import addnodes

WORDS = {
    "attention_from_scratch": ["attention", "self-attention", "softmax", "causal mask", "heads", "transformer block"],
    "kv_cache": ["kv cache", "cache", "key-value cache", "decoding", "quantised cache", "sliding window"],
    "multi_query_attention": ["MQA", "multi-query attention", "multi query attention"],
    "grouped_query_attention": ["GQA", "grouped-query attention", "grouped query attention", "groups"],
    "latent_attention": ["MLA", "latent attention", "multi-head latent attention", "DeepSeek"],
    "positions": ["rope", "rotary", "rotary positions", "positions", "YaRN", "NTK", "long context"],
    "encoder_decoder": ["encoder", "decoder", "cross-attention", "cross attention"],
    "newest_variants": ["differential attention", "sparse attention", "sinks", "variants"],
    "linear_attention": ["linear attention", "DeltaNet", "delta rule", "recurrent state"],
    "performance": ["roofline", "performance", "speed"],
    "conversion_and_uptraining": ["uptraining", "convert to GQA", "conversion"],
    "errata": ["mistakes", "errata"],
}


def add(app, doctree):
    folder, _, name = app.env.docname.rpartition("/")
    if folder == "notebooks":
        entries = [("single", word, "", "main", None) for word in WORDS[name]]
        doctree.insert(0, addnodes.index(entries=entries))
