"""Draws the paper's figures 1 and 2 anew, as SVG, with the words of each language."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

WORDS = {
    "en": {
        "encoder": "Encoder",
        "decoder": "Decoder",
        "source": "source tokens",
        "target": "target tokens so far, behind <s>",
        "embedding": "Embedding",
        "positions": "Positions",
        "attention": "Multi-head\nattention",
        "masked": "Masked multi-head\nattention",
        "norm": "Add, then norm",
        "feed_forward": "Feed-forward",
        "linear": "Linear",
        "softmax": "Softmax",
        "next": "probabilities of the next token",
        "matmul": "Matrix product",
        "scale": "Divide by √d_k",
        "mask": "Mask: −∞ where forbidden",
        "dot_product": "Scaled dot-product\nattention",
        "concat": "Concatenate",
        "one_head": "Scaled dot-product attention",
        "heads": "Multi-head attention",
    },
    "zh": {
        "encoder": "编码器",
        "decoder": "解码器",
        "source": "源句词元",
        "target": "已写出的目标词元（前面加 <s>）",
        "embedding": "词嵌入",
        "positions": "位置编码",
        "attention": "多头注意力",
        "masked": "带掩码的\n多头注意力",
        "norm": "相加，再归一化",
        "feed_forward": "前馈网络",
        "linear": "线性层",
        "softmax": "Softmax",
        "next": "下一个词元的概率",
        "matmul": "矩阵相乘",
        "scale": "除以 √d_k",
        "mask": "掩码：禁止处为 −∞",
        "dot_product": "缩放点积注意力",
        "concat": "拼接",
        "one_head": "缩放点积注意力",
        "heads": "多头注意力",
    },
}
ATTENTION, NORM, FEED_FORWARD, EMBEDDING, OUTPUT = "#fde3c8", "#f5f2c4", "#cfe8f5", "#f8d9dd", "#ddd8f3"
_HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"
 font-family="Helvetica, Arial, 'Noto Sans CJK SC', 'PingFang SC', 'Microsoft YaHei', sans-serif" font-size="14"
 text-anchor="middle" fill="#222">
<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">
<path d="M0 0 8 4 0 8z"/></marker></defs>
<rect width="{width}" height="{height}" rx="8" fill="#fff"/>
"""


class Drawing:
    """An SVG picture; y grows downwards, a box is named by its middle."""

    def __init__(self, width: int, height: int) -> None:
        self.parts = [_HEAD.format(width=width, height=height)]

    def text(self, x: float, y: float, words: str, extra: str = "") -> None:
        """Writes a line, centred."""
        self.parts.append(f'<text x="{x:g}" y="{y + 5:g}" {extra}>{escape(words)}</text>\n')

    def box(self, x: float, y: float, words: str, fill: str, width: int = 156, height: int = 38) -> None:
        """Draws a box with a line or two."""
        place = f'x="{x - width / 2:g}" y="{y - height / 2:g}" width="{width}" height="{height}"'
        self.parts.append(f'<rect {place} rx="6" fill="{fill}" stroke="#555"/>\n')
        lines = words.split("\n")
        for number, line in enumerate(lines):
            self.text(x, y + 16 * (number - (len(lines) - 1) / 2), line)

    def arrow(self, *points: tuple[float, float]) -> None:
        """Draws a line through points, with a head at its end."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="#222" marker-end="url(#head)"/>\n')

    def frame(self, left: float, top: float, right: float, bottom: float) -> None:
        """Draws what is there N times."""
        place = f'x="{left:g}" y="{top:g}" width="{right - left:g}" height="{bottom - top:g}"'
        self.parts.append(f'<rect {place} rx="12" fill="#f6f6f6" stroke="#999" stroke-dasharray="5 4"/>\n')

    def write(self, path: Path) -> None:
        """Writes the file."""
        path.write_text("".join([*self.parts, "</svg>\n"]), encoding="utf-8")


def _draw_stack(drawing: Drawing, words: dict[str, str], x: float, side: int, sublayers: Sequence[str]) -> float:
    """Draws tokens, embedding, positions and one layer from the bottom upwards; returns the y of the layer's top."""
    drawing.box(x, 610, words["embedding"], EMBEDDING)
    drawing.arrow((x, 645), (x, 630))
    drawing.arrow((x, 591), (x, 577))
    drawing.parts.append(f'<circle cx="{x:g}" cy="566" r="10" fill="#fff" stroke="#555"/>\n')
    drawing.text(x, 566, "+")
    drawing.arrow((x + side * 62, 566), (x + side * 11, 566))
    drawing.text(x + side * 98, 566, words["positions"])
    top = 548 - 112 * len(sublayers)
    drawing.frame(x - 112, top, x + 112, 544)
    drawing.text(x + side * 128, (top + 544) / 2, "N×")
    y = 556.0
    for name in sublayers:
        inner = y - 58
        drawing.arrow((x, y), (x, inner + 20))
        drawing.box(x, inner, words[name], FEED_FORWARD if name == "feed_forward" else ATTENTION)
        drawing.arrow((x, inner - 19), (x, inner - 27))
        drawing.box(x, inner - 41, words["norm"], NORM, height=26)
        # The residual connection passes the sub-layer by.
        bend = x + side * 98
        drawing.arrow((x, inner + 30), (bend, inner + 30), (bend, inner - 41), (x + side * 79, inner - 41))
        y = inner - 54
    return y


def draw_figure_1(words: dict[str, str], path: Path) -> None:
    """Draws the whole model."""
    drawing = Drawing(660, 680)
    left, right = 180, 455
    for x, stack, tokens in ((left, "encoder", "source"), (right, "decoder", "target")):
        drawing.text(x, 660, words[tokens])
        drawing.text(x, 16 if x == right else 240, words[stack], 'font-size="17" font-weight="bold"')
    encoded = _draw_stack(drawing, words, left, -1, ("attention", "feed_forward"))
    decoded = _draw_stack(drawing, words, right, 1, ("masked", "attention", "feed_forward"))
    drawing.arrow((left, encoded), (left, encoded - 50), (317, encoded - 50), (317, 386), (right - 79, 386))
    drawing.text(250, encoded - 62, "K, V")
    drawing.arrow((right, decoded), (right, 186))
    drawing.box(right, 166, words["linear"], OUTPUT)
    drawing.arrow((right, 147), (right, 133))
    drawing.box(right, 113, words["softmax"], OUTPUT)
    drawing.arrow((right, 94), (right, 72))
    drawing.text(right, 58, words["next"])
    drawing.write(path)


def draw_figure_2(words: dict[str, str], path: Path) -> None:
    """Draws attention, and several heads of it."""
    drawing = Drawing(700, 420)
    drawing.text(165, 20, words["one_head"], 'font-size="16" font-weight="bold"')
    for y, name, fill in (
        (300, "matmul", ATTENTION),
        (245, "scale", NORM),
        (190, "mask", EMBEDDING),
        (135, "softmax", FEED_FORWARD),
    ):
        drawing.box(130, y, words[name], fill, width=190)
        drawing.arrow((130, y - 19), (130, y - 35))
    drawing.box(165, 80, words["matmul"], ATTENTION, width=230)
    drawing.arrow((165, 61), (165, 40))
    for x, name, end in ((85, "Q", 320), (175, "K", 320), (260, "V", 100)):
        drawing.arrow((x, 375), (x, end))
        drawing.text(x, 390, name)
    drawing.text(510, 20, words["heads"], 'font-size="16" font-weight="bold"')
    for shift in (16, 8, 0):
        for x, name in ((410, "Q"), (510, "K"), (610, "V")):
            drawing.box(x + shift, 290 - shift, words["linear"], OUTPUT, width=80, height=34)
            if not shift:
                drawing.arrow((x, 375), (x, 308))
                drawing.text(x, 390, name)
        drawing.box(510 + shift, 205 - shift, words["dot_product"], ATTENTION, width=280, height=44)
    for x in (410, 510, 610):
        drawing.arrow((x, 273), (x, 228))
    drawing.text(680, 190, "H")
    drawing.arrow((510, 167), (510, 151))
    drawing.box(510, 131, words["concat"], NORM, width=200)
    drawing.arrow((510, 112), (510, 99))
    drawing.box(510, 80, words["linear"], OUTPUT, width=200)
    drawing.arrow((510, 61), (510, 40))
    drawing.write(path)


def draw_figures(folder: Path) -> None:
    """Writes figure1 and figure2 in each language."""
    for language, words in WORDS.items():
        draw_figure_1(words, folder / f"figure1.{language}.svg")
        draw_figure_2(words, folder / f"figure2.{language}.svg")
