"""Formulas as MathML, made by docutils. Readers need no script to show them."""

import re

from docutils.nodes import SkipNode
from docutils.utils.math.latex2mathml import tex2mathml

# Sizes of brackets. Docutils does not know these commands, and browsers choose sizes themselves.
_SIZES = re.compile(r"\\[bB]igg?[lr]?(?![A-Za-z])")


def _inline(translator, node):
    translator.body.append(tex2mathml(_SIZES.sub("", node.astext())))
    raise SkipNode


def _block(translator, node):
    formula = tex2mathml(_SIZES.sub("", node.astext()), as_block=True)
    translator.body.append(f'<div class="math">{formula}</div>')
    raise SkipNode


def setup(app):
    """Register the renderer."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
