"""The document: Markdown with its figures beside it, and the same in one HTML file with vector figures inside."""

import base64
import io
import re
from pathlib import Path

import matplotlib.pyplot as plt
from markdown_it import MarkdownIt

from .tables import Table

STYLE = """
:root { color-scheme: light dark; --line: #ddd; --soft: #555 }
@media (prefers-color-scheme: dark) { :root { --line: #444; --soft: #aaa } body { background: #16181c; color: #ddd } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; overflow-wrap: break-word }
table { border-collapse: collapse; font-size: 13px; display: block; overflow-x: auto; font-variant-numeric: tabular-nums }
td, th { border-bottom: 1px solid var(--line); padding: .3rem .7rem; text-align: left }
[style*="right"] { white-space: nowrap }
img { max-width: 100%; margin-top: 1rem; background: white }
p:has(> img) + p { color: var(--soft); font-size: 13px; margin-bottom: 2rem }
"""
NUMBER = re.compile(r"(not by )?[+-]?[\d,.]+( .*)?|—")  # the cells of a column that is set to the right


def markdown_table(table: Table) -> str:
    """Columns of numbers are set to the right."""
    cells = table.frame.map(lambda cell: str(cell).replace("|", "\\|"))
    align = ["right" if all(NUMBER.fullmatch(cell) for cell in cells[name]) else "left" for name in cells]
    return cells.to_markdown(index=False, disable_numparse=True, colalign=align)


def write_whole(path: Path, text: str) -> None:
    """Write a file under a temporary name and rename it."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
    temporary.replace(path)


class Document:
    """Headings, paragraphs, lists, tables and figures in order; figures are written into `out` as they come."""

    def __init__(self, title: str, out: Path):
        self.title, self.out = title, out
        self.blocks, self.tables, self.vectors = [], [], {}  # vectors: PNG file -> SVG
        self.last_heading = ""

    def heading(self, text: str) -> None:
        self.last_heading = text
        self.blocks.append(f"## {text}")

    def text(self, text: str) -> None:
        self.blocks.append(text)

    def table(self, table: Table, otherwise: str = "") -> None:
        """A table with its notes; a sentence in its place if it has no rows."""
        if table.frame.empty:
            self.blocks.append(otherwise)
            return
        self.blocks += [markdown_table(table), *table.notes]
        self.tables.append((self.last_heading, markdown_table(table)))

    def figure(self, figure, name: str, caption: str) -> None:
        """Keep a figure as NAME.png and NAME.pdf; None is said to be missing."""
        if figure is None:
            self.text(f"Not drawn, because no run has the numbers: {caption}")
            return
        while f"{name}.png" in self.vectors:
            name += "_2"  # two labels that differ in punctuation alone
        vector = io.BytesIO()
        figure.savefig(vector, format="svg", metadata={"Date": None})
        figure.set_layout_engine("none")  # it stays where it is, in all three
        figure.savefig(self.out / f"{name}.png")
        figure.savefig(self.out / f"{name}.pdf", metadata={"CreationDate": None})
        plt.close(figure)
        self.vectors[f"{name}.png"] = vector.getvalue()
        alternative = caption.replace("[", "(").replace("]", ")")
        self.blocks.append(f"![{alternative}]({name}.png)\n\n{caption}")

    def markdown(self) -> str:
        return f"# {self.title}\n\n" + "\n\n".join(self.blocks) + "\n"

    def html(self) -> str:
        """One file that needs no other. Names of runs stand as they are: no _emphasis_, no markup of their own."""
        body = MarkdownIt("zero").enable(["heading", "list", "table", "image", "link", "backticks"]).render(self.markdown())
        for name, vector in self.vectors.items():
            body = body.replace(f'src="{name}"', f'src="data:image/svg+xml;base64,{base64.b64encode(vector).decode()}"')
        head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        head += f"<title>{self.title}</title><style>{STYLE}</style>"
        return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}</body></html>\n'

    def write(self) -> None:
        """Write report.md and report.html, and remove the figures of the report before that are not in this one."""
        old = self.out / "report.md"
        before = old.read_text(encoding="utf-8", errors="replace") if old.exists() else ""
        for name, text in (("report.md", self.markdown()), ("report.html", self.html())):
            write_whole(self.out / name, text)
        if before.startswith(f"# {self.title}\n"):
            for name in set(re.findall(r"^!\[.*\]\(([\w.+-]+\.png)\)$", before, re.MULTILINE)) - set(self.vectors):
                for path in (self.out / name, (self.out / name).with_suffix(".pdf")):
                    path.unlink(missing_ok=True)
