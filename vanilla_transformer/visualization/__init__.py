"""What this package can show, in one place: a training, attention and the word alignments in it, positions, masks."""

from .attention import AttentionMap, align_file, align_lines, align_words, collect_attention, format_pharaoh
from .curves import compare_learning_curves, load_trainer_state, plot_learning_curves
from .figures import PICTURE_FORMATS
from .heatmaps import plot_attention
from .labels import split_words
from .page import save_attention_page
from .paper import plot_masks, plot_positions, position_table

__all__ = [
    "PICTURE_FORMATS",
    "AttentionMap",
    "align_file",
    "align_lines",
    "align_words",
    "collect_attention",
    "compare_learning_curves",
    "format_pharaoh",
    "load_trainer_state",
    "plot_attention",
    "plot_learning_curves",
    "plot_masks",
    "plot_positions",
    "position_table",
    "save_attention_page",
    "split_words",
]
