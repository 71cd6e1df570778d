"""Write the results as a page of the documentation, in English and Chinese."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tools.families.breaking import MUTATIONS
from tools.families.catalogue import attention_layers

DOCS = Path(__file__).resolve().parents[2] / "docs"

_TEXTS: dict[str, dict[str, str]] = {
    "en": {
        "title": "# Model families",
        "other": "[中文](families.zh.md)",
        "intro": (
            "`python -m tools.families` runs every model class of transformers that transformers exports, with random "
            "weights and a tiny configuration, once with eager attention and once with ours, and compares them. This "
            "page is its output, with transformers {version}. `make families` installs the other packages that models "
            "need (timm, torchvision, scipy) in a folder of their own, and runs it."
        ),
        "how": (
            "- **Inputs**: three samples, one padded on the left and one on the right; text, images, sound or videos by "
            "the signature of the model. Models of several inputs get text where that is enough; their encoders are "
            "classes of their own.\n"
            "- **Weights** are scaled until attention is sharp: the median entropy of a query's weights is below half of "
            "that of an even spread, or scaling changes it no more, as with a softcap. Softcaps are lowered to 6.\n"
            "- **Eager attention** is that of transformers. Where it cannot be run or misreads its mask ({plain}), it is "
            "softmax(q k' + bias + mask) v in plain operations.\n"
            "- **Equal** means: outputs differ from eager ones in float64 by at most {factor:g} times the distance of "
            "eager float32 from float64 (plus {floor:g} of the mean output); weights of `mh.observe` are those of eager "
            "attention; our function was called as often as the eager one, by the same layers; and, where the model "
            "generates, {steps} tokens decoded with a cache have equal logits.\n"
            "- **Rejected** means that `mh.observe` raises an error, because a layer, which the table names, computes "
            "attention that would not be ours. Attention here means softmax weights between queries and keys: linear, deformable and state-space "
            "layers are computed by the model in either case."
        ),
        "counts": "## Results",
        "counts_head": "| result | classes | families |\n|---|---|---|",
        "equal": "equal",
        "rejected": "rejected with a clear error",
        "no attention": "no attention layer",
        "not built": "cannot be built here",
        "different": "different",
        "sharp": (
            "The median over all equal classes of the median entropy is {median:.2f} of an even spread; it is above 0.5 "
            "for {above} classes. {cached} classes were also compared with a cache, and the weights of {weights} of "
            "{calls} calls with eager ones; the other calls return no weights, or belong to a layer that is called "
            "more than once."
        ),
        "layers": (
            "Of {total} classes of attention layers that use transformers' interface, {ran} ran in a model that is "
            "equal. The others are parts of models that are rejected or cannot be built, or need inputs that were not "
            "given: {names}."
        ),
        "mutations": "## Errors that the comparison finds",
        "mutations_text": (
            "`python -m tools.families --mutate` drops one part of our attention, and expects a difference in every "
            "family that uses it, in one class each. It also gives one layer of Llama attention that bypasses ours, in "
            "{detours} ways (tools/families/detours.py); each must be equal or rejected."
        ),
        "mutations_head": "| dropped | families | found |\n|---|---|---|",
        "missed": "not found in {names}",
        "built": "## Cannot be built here",
        "built_head": "| family | class | exception |\n|---|---|---|",
        "refused": "## Rejected",
        "refused_head": "| family | classes | first layer and reason |\n|---|---|---|",
        "same": "## Equal",
        "same_head": "| family | classes | with a cache | parts of attention |\n|---|---|---|---|",
        "none": "## Without attention layers",
        "wrong": "## Different",
    },
    "zh": {
        "title": "# 模型族",
        "other": "[English](families.md)",
        "intro": (
            "`python -m tools.families` 用随机权重和极小的配置，运行 transformers 导出的每个模型类，一次用 eager 注意力，"
            "一次用我们的，然后比较。本页是它的输出，transformers 版本为 {version}。`make families` 把模型需要的其他包（timm、torchvision、"
            "scipy）装到单独的文件夹，然后运行它。"
        ),
        "how": (
            "- **输入**：三个样本，一个在左侧填充，一个在右侧填充；按模型的签名给文本、图像、声音或视频。有多种输入的模型，"
            "如果文本就够，只给文本；它们的编码器是单独的类。\n"
            "- **权重**会放大到注意力足够尖锐：每个查询的权重的熵，中位数低于均匀分布的一半，或者继续放大已不再改变它"
            "（例如有 softcap 时）。softcap 降到 6。\n"
            "- **eager 注意力**是 transformers 的。它无法运行或误读掩码的地方（{plain}），用普通运算的 softmax(q k' + bias + mask) v 代替。\n"
            "- **相等**表示：输出与 float64 的 eager 输出的差，不超过 eager 的 float32 与 float64 之差的 {factor:g} 倍"
            "（外加平均输出的 {floor:g}）；`mh.observe` 的权重等于 eager 注意力的权重；我们的函数与 eager 函数由相同的层调用，"
            "次数相同；模型能生成时，用缓存解码的 {steps} 个词元的 logits 也相等。\n"
            "- **拒绝**表示 `mh.observe` 抛出错误，因为表中列出的层自己计算注意力。这里的注意力指查询与键之间的 softmax 权重："
            "线性注意力、可变形注意力和状态空间层，在两种情况下都由模型自己计算。"
        ),
        "counts": "## 结果",
        "counts_head": "| 结果 | 类 | 族 |\n|---|---|---|",
        "equal": "相等",
        "rejected": "以明确的错误拒绝",
        "no attention": "没有注意力层",
        "not built": "无法在此构建",
        "different": "不同",
        "sharp": (
            "所有相等的类，熵的中位数的中位数是均匀分布的 {median:.2f}；有 {above} 个类高于 0.5。{cached} 个类还比较了带缓存的解码；"
            "{calls} 次调用中，{weights} 次的权重与 eager 的权重作了比较；其余的调用不返回权重，或者所在的层被调用不止一次。"
        ),
        "layers": (
            "使用 transformers 接口的注意力层共有 {total} 个类，其中 {ran} 个在相等的模型中运行过。其余的属于被拒绝或无法构建的模型，"
            "或者需要这里没有给出的输入：{names}。"
        ),
        "mutations": "## 比较能发现的错误",
        "mutations_text": (
            "`python -m tools.families --mutate` 去掉我们的注意力的一个部分，并要求用到它的每个族（各取一个类）都出现差异。"
            "它还用 {detours} 种方式让 Llama 的一层绕过我们的注意力（tools/families/detours.py）；每一种都必须相等或被拒绝。"
        ),
        "mutations_head": "| 去掉 | 族 | 发现 |\n|---|---|---|",
        "missed": "未发现：{names}",
        "built": "## 无法在此构建",
        "built_head": "| 族 | 类 | 异常 |\n|---|---|---|",
        "refused": "## 拒绝",
        "refused_head": "| 族 | 类 | 第一个层和原因 |\n|---|---|---|",
        "same": "## 相等",
        "same_head": "| 族 | 类 | 带缓存 | 注意力的部分 |\n|---|---|---|---|",
        "none": "## 没有注意力层",
        "wrong": "## 不同",
    },
}
_OUTCOMES = ("equal", "rejected", "no attention", "not built", "different")


def write_pages(results: Iterable[dict[str, Any]], version: str) -> None:
    """Write docs/families.md and docs/families.zh.md."""
    found, layers = list(results), attention_layers()
    for language, name in (("en", "families.md"), ("zh", "families.zh.md")):
        (DOCS / name).write_text(page(found, version, language, layers), encoding="utf-8")


def page(results: list[dict[str, Any]], version: str, language: str, layers: set[tuple[str, str]]) -> str:
    """Return the page in one language.

    Args:
        results: those of all classes and mutations.
        version: that of transformers.
        language: "en" or "zh".
        layers: all classes of attention layers, with their families.
    """
    from tools.families.comparison import FACTOR, FLOOR, STEPS
    from tools.families.detours import DETOURS
    from tools.families.overrides import WITHOUT_EAGER

    say = _TEXTS[language]
    classes = [each for each in results if not each["mutation"] and not each["part"]]
    by_outcome = {name: [each for each in classes if each["outcome"] == name] for name in _OUTCOMES}
    equal = by_outcome["equal"]
    entropies = sorted(each["entropy"] for each in equal if each["entropy"] == each["entropy"])
    lines = [
        say["title"],
        say["other"],
        say["intro"].format(version=version),
        say["how"].format(
            factor=FACTOR, floor=FLOOR, steps=STEPS, plain=", ".join(f"`{name}*`" for name in WITHOUT_EAGER)
        ),
        say["counts"],
        "\n".join(
            [
                say["counts_head"],
                *(
                    f"| {say[name]} | {len(found)} | {len({each['family'] for each in found})} |"
                    for name, found in by_outcome.items()
                    if found or name != "different"
                ),
            ]
        ),
        say["sharp"].format(
            median=entropies[len(entropies) // 2] if entropies else float("nan"),
            above=sum(each > 0.5 for each in entropies),
            cached=sum(each["cached"] for each in equal),
            weights=sum(each["weights"] for each in equal),
            calls=sum(each["calls"] for each in equal),
        ),
        _layers_that_ran(results, layers, say),
        say["mutations"],
        say["mutations_text"].format(detours=len(DETOURS)),
        _mutations([each for each in results if each["mutation"]], say),
        say["built"],
        _by_class(by_outcome["not built"], say["built_head"]),
    ]
    if by_outcome["different"]:
        lines += [say["wrong"], _by_class(by_outcome["different"], say["built_head"])]
    lines += [
        say["refused"],
        _by_family(by_outcome["rejected"], say["refused_head"], lambda found: [_refusal(found[0]["reason"])]),
        say["same"],
        _by_family(equal, say["same_head"], _parts_of_family),
        say["none"],
        ", ".join(f"`{name}`" for name in sorted({each["family"] for each in by_outcome["no attention"]})) + ".",
    ]
    return "\n\n".join(lines) + "\n"


def _layers_that_ran(results: list[dict[str, Any]], layers: set[tuple[str, str]], say: dict[str, str]) -> str:
    ran = {kind for each in results if each["outcome"] == "equal" for kind in each["kinds"]}
    others = sorted(name for _, name in layers if name not in ran)
    names = ", ".join(f"`{name}`" for name in others) or "-"
    return say["layers"].format(total=len(layers), ran=len(layers) - len(others), names=names)


def _mutations(results: list[dict[str, Any]], say: dict[str, str]) -> str:
    lines = [say["mutations_head"]]
    for mutation in MUTATIONS:
        found = [each for each in results if each["mutation"] == mutation]
        missed = [each["family"] for each in found if each["outcome"] != "different"]
        names = f"; {say['missed'].format(names=', '.join(missed))}" if missed else ""
        lines.append(f"| {mutation} | {len(found)} | {len(found) - len(missed)}{names} |")
    return "\n".join(lines)


def _by_class(results: list[dict[str, Any]], head: str) -> str:
    ordered = sorted(results, key=lambda each: (each["family"], each["name"]))
    rows = [f"| `{each['family']}` | `{each['name']}` | `{_cell(each['reason'], 240)}` |" for each in ordered]
    return "\n".join([head, *rows])


def _by_family(results: list[dict[str, Any]], head: str, cells: Any) -> str:
    families: dict[str, list[dict[str, Any]]] = {}
    for each in sorted(results, key=lambda each: each["family"]):
        families.setdefault(each["family"], []).append(each)
    rows = ["| " + " | ".join([f"`{name}`", str(len(found)), *cells(found)]) + " |" for name, found in families.items()]
    return "\n".join([head, *rows])


def _parts_of_family(found: list[dict[str, Any]]) -> list[str]:
    parts = Counter(part for each in found for part in each["features"])
    return [str(sum(each["cached"] for each in found) or ""), ", ".join(part for part in MUTATIONS if parts[part])]


def _refusal(reason: str) -> str:
    return _cell(reason.split(" Use ", maxsplit=1)[0])


def _cell(text: str, length: int = 160) -> str:
    return text[:length].replace("|", "\\|").replace("`", "'")
