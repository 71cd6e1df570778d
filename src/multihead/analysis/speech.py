"""The words of the findings: language -> topic -> "what a page says|what a terminal says".

A page sets the head's name before the first part. A topic is "weak" where its head stays below the threshold
of its kind, so that the sentence claims no more than the number does.
"""

SPEECH: dict[str, dict[str, str]] = {
    "en": {
        "place": "layer {layer} head {head}: ",
        "first token": "{token}",
        "a first token": "the first token",
        "separators": "special tokens",
        "previous": "looks one token back: {share} of its attention is on the previous token."
        "|{share} on the previous token",
        "previous weak": "looks back most: {share} of its attention is on the previous token."
        "|{share} on the previous token",
        "next": "looks one token ahead: {share} is on the next token.|{share} on the next token",
        "next weak": "looks ahead most: {share} is on the next token.|{share} on the next token",
        "first": "rests on {first}: {share} goes to the first token.|{share} on the first token",
        "first weak": "goes back to {first} most: {share} goes to the first token.|{share} on the first token",
        "broad": "reads widely: each query spreads over {value} of {keys} tokens, as if evenly."
        "|reads widely, over {value} of {keys} tokens as if evenly",
        "broad weak": "reads most widely: each query spreads over {value} of {keys} tokens, as if evenly."
        "|reads most widely, over {value} of {keys} tokens as if evenly",
        "self": "looks at itself: {share} stays on the query’s own token.|{share} on the query’s own token",
        "self weak": "looks at itself most: {share} stays on the query’s own token.|{share} on the query’s own token",
        "induction": "goes on where it was before: {share} is on the tokens right after an earlier one like the "
        "query’s.|{share} on what followed the same token before",
        "induction weak": "goes on most where it was before: {share} is on the tokens right after an earlier one like "
        "the query’s.|{share} on what followed the same token before",
        "duplicate": "finds the same token again: {share} is on earlier ones like the query’s."
        "|{share} on earlier tokens like the query’s",
        "duplicate weak": "finds the same token again most: {share} is on earlier ones like the query’s."
        "|{share} on earlier tokens like the query’s",
        "distance": "reaches farthest: {value} tokens from the query on average."
        "|reaches farthest, {value} tokens from the query on average",
        "separator": "rests on {separator}: {share} of its attention.|{share} on {separator}",
        "separator weak": "goes to {separator} most: {share} of its attention.|{share} on {separator}",
        "focused": "is the sharpest: each query looks at {value} tokens, as if evenly."
        "|the sharpest, each query looks at {value} tokens as if evenly",
        "mean": "The mean over all heads is {value}",
        "none": "No head passes the threshold of {share}",
        "one": "1 of {heads} heads does so",
        "some": "{number} of {heads} heads do so",
        "most": ", most of them in layer {layer}",
    },
    "zh": {
        "place": "第 {layer} 层第 {head} 头：",
        "first token": "{token}",
        "a first token": "首词元",
        "separators": "特殊词元",
        "previous": "回看一个词元：{share} 的注意力落在前一个词元上。|{share} 落在前一个词元上",
        "previous weak": "最常回看：{share} 的注意力落在前一个词元上。|{share} 落在前一个词元上",
        "next": "前看一个词元：{share} 落在后一个词元上。|{share} 落在后一个词元上",
        "next weak": "最常前看：{share} 落在后一个词元上。|{share} 落在后一个词元上",
        "first": "停在 {first} 上：{share} 落在首词元上。|{share} 落在首词元上",
        "first weak": "最常回到 {first}：{share} 落在首词元上。|{share} 落在首词元上",
        "broad": "读得很广：每个查询相当于均匀看 {keys} 个词元中的 {value} 个。"
        "|读得很广，相当于均匀看 {keys} 个词元中的 {value} 个",
        "broad weak": "读得最广：每个查询相当于均匀看 {keys} 个词元中的 {value} 个。"
        "|读得最广，相当于均匀看 {keys} 个词元中的 {value} 个",
        "self": "看自己：{share} 留在查询自身的词元上。|{share} 留在自身上",
        "self weak": "最常看自己：{share} 留在查询自身的词元上。|{share} 留在自身上",
        "induction": "接着从前往下看：{share} 落在与查询相同的先前词元的后一个上。|{share} 落在相同词元先前的后一个上",
        "induction weak": "最常接着从前往下看：{share} 落在与查询相同的先前词元的后一个上。"
        "|{share} 落在相同词元先前的后一个上",
        "duplicate": "找回相同的词元：{share} 落在与查询相同的先前词元上。|{share} 落在先前的相同词元上",
        "duplicate weak": "最常找回相同的词元：{share} 落在与查询相同的先前词元上。|{share} 落在先前的相同词元上",
        "distance": "看得最远：平均离查询 {value} 个词元。|看得最远，平均离查询 {value} 个词元",
        "separator": "停在 {separator} 上：占其注意力的 {share}。|{share} 落在 {separator} 上",
        "separator weak": "最常看 {separator}：占其注意力的 {share}。|{share} 落在 {separator} 上",
        "focused": "最集中：每个查询相当于均匀看 {value} 个词元。|最集中，每个查询相当于均匀看 {value} 个词元",
        "mean": "所有头的平均值为 {value}",
        "none": "没有头达到 {share} 的阈值",
        "one": "{heads} 个头中有 1 个如此",
        "some": "{heads} 个头中有 {number} 个如此",
        "most": "，多数在第 {layer} 层",
    },
}
