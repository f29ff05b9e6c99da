"""Pictures of a training, of attention, of positions and of masks: what this package can draw, in one place."""

from .attention_html import save_attention_page
from .attention_plots import plot_attention
from .learning_curves import compare_learning_curves, load_trainer_state, plot_learning_curves
from .paper_plots import plot_masks, plot_positions, position_table
from .pictures import PICTURE_FORMATS

__all__ = [
    "PICTURE_FORMATS",
    "compare_learning_curves",
    "load_trainer_state",
    "plot_attention",
    "plot_learning_curves",
    "plot_masks",
    "plot_positions",
    "position_table",
    "save_attention_page",
]
