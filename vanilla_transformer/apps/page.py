"""The page, made with Gradio: what is on it, and what answers to which button."""

import functools
import html
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vanilla_transformer.files import explain_missing
from vanilla_transformer.hub.words import as_code
from vanilla_transformer.tasks import TRANSLATION
from vanilla_transformer.visualization.page import attention_page

from .answers import MAX_BEAMS, DemoError, DemoModel, Settings, translate_text
from .shelf import ModelShelf

if TYPE_CHECKING:
    import gradio

    from vanilla_transformer.visualization.attention import AttentionMap

logger = logging.getLogger(__name__)

_QUEUE_SIZE = 32
_ERROR_SECONDS = 20
# What the model does with a text, and what comes out, by the names of tasks.
_WORDS = {
    "translation": ("translate", "Translation"),
    "summarization": ("summarize", "Summary"),
    "text2text": ("generate", "Output"),
}
_NO_ATTENTION = '<p class="nothing-yet">Here you will see where the model looks while it writes.</p>'
# Every paragraph has the direction of its own script. The table's last column takes what the others leave.
_CSS = """
.attention-frame { width: 100%; height: 34rem; border: 0; display: block; }
.nothing-yet { padding: 6em 2em; text-align: center; opacity: 0.6; }
#text textarea, #translation textarea, #prefix :is(input, textarea), #examples button, #n-best [role=gridcell] span {
  unicode-bidi: plaintext; text-align: start;
}
#n-best { --font-mono: var(--font); }
#n-best [role=gridcell] span { display: block; width: 100%; overflow-wrap: anywhere; white-space: pre-wrap; }
#n-best :is([role=columnheader] span, [role=gridcell]:nth-child(-n + 2) span) {
  overflow-wrap: normal; white-space: nowrap;
}
#n-best :is(.header-table, .virtual-body) { width: 100% !important; table-layout: fixed; }
#n-best :is([role=columnheader], [role=gridcell]):nth-child(3) {
  flex: 1 1 0 !important; width: auto !important; min-width: 0 !important; max-width: none !important;
}
"""
# The attention's page is in a frame that reaches nothing around it. It tells its height, and is told the theme.
# The style is of what is around the page's own components, where Gradio's `css` does not reach.
_HEAD = """
<style>
@media (max-width: 600px) { .gradio-container > .main { padding: 0.75rem !important; } }
</style>
<script>
const findFrames = () => [...document.querySelectorAll("iframe.attention-frame")];
const tellTheme = (frame) => {
  const theme = document.body.classList.contains("dark") ? "dark" : "light";
  frame.contentWindow?.postMessage({ theme }, "*");
};
addEventListener("message", ({ source, data }) => {
  const frame = findFrames().find((each) => each.contentWindow === source);
  if (!frame || !Number.isFinite(data?.height)) return;
  frame.style.height = `${Math.min(Math.max(Math.ceil(data.height), 100), 30000)}px`;
  tellTheme(frame);
});
// Browsers leave a frame that is out of sight undrawn, and what it observes unsaid, until it is told something.
document.addEventListener("load", ({ target }) => findFrames().includes(target) && tellTheme(target), true);
const watchTheme = () => {
  const watched = { attributes: true, attributeFilter: ["class"] };
  new MutationObserver(() => findFrames().forEach(tellTheme)).observe(document.body, watched);
};
if (document.body) watchTheme();
else addEventListener("DOMContentLoaded", watchTheme);
</script>
"""

# The results before there are any: translation, table, remark and attention.
_EMPTY = ("", None, "", _NO_ATTENTION)


def import_gradio() -> Any:
    """Returns Gradio, told to report nothing about its use and to keep no record of the requests."""
    os.environ.update(GRADIO_ANALYTICS_ENABLED="False", GRADIO_RUN_HISTORY="False")
    with explain_missing("The page needs Gradio", extra="demo", packages="gradio"):
        import gradio
    return gradio


def build_page(shelf: ModelShelf, settings: Settings | None = None) -> "gradio.Blocks":
    """Builds the page, with the first model loaded if there is one; `launch_page` shows it.

    `settings` has the longest text, and languages and prefix of the first model. The page's API has one function,
    `/translate`: text and settings to the translation, a table of all, a remark, and the attention as HTML.
    """
    page: gradio.Blocks = _Page(shelf, settings or Settings()).blocks
    return page


def launch_page(page: "gradio.Blocks", **options: Any) -> str:
    """Opens the page to browsers, and returns its address at once; `options` are those of Gradio's `launch`."""
    common: dict[str, Any] = {"prevent_thread_lock": True, "quiet": True, "show_error": True}
    # Nothing on the page takes files; Gradio would take any.
    common |= {"enable_monitoring": False, "max_file_size": 0}
    _, address, _ = page.launch(css=_CSS, head=_HEAD, footer_links=["api", "gradio"], **common, **options)
    return str(address)


def for_people(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function's errors such as Gradio shows to people: those of the program go to the log."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except DemoError as error:
            # The page takes its messages for HTML.
            message = html.escape(str(error), quote=False).replace("\n", "<br>")
            if error.whole != str(error):
                logger.warning("%s", error.whole)
        except Exception as error:
            logger.exception("The page could not answer.")
            message = f"The program failed ({type(error).__name__}); its log says where."
        raise import_gradio().Error(message, duration=_ERROR_SECONDS, print_exception=False)

    return wrapped


class _Page:
    """The page's parts, and what happens when they are used; a session remembers no more than its model's name."""

    def __init__(self, shelf: ModelShelf, settings: Settings) -> None:
        self.gr = gr = import_gradio()
        self.shelf, self.settings = shelf, settings
        look = self._look(None if shelf.name is None else shelf.get(shelf.name))
        with gr.Blocks(title="Where the model looks", fill_width=True, analytics_enabled=False) as self.blocks:
            self.model_name = gr.State(shelf.name)
            self.heading = gr.Markdown(**look["heading"])
            self.summary = gr.Markdown(**look["summary"])
            with gr.Row():
                with gr.Column(scale=4, min_width=420):
                    self._add_text(look)
                    self._add_search(look)
                    self._add_results(look)
                    self._add_model(look)
                with gr.Column(scale=5, min_width=420):
                    self.attention = gr.HTML(_NO_ATTENTION, label="Attention", elem_id="attention")
            self._connect()
        self.blocks.queue(max_size=_QUEUE_SIZE)

    def _look(self, demo: DemoModel | None) -> dict[str, dict[str, Any]]:
        """What depends on the model: the arguments of these components."""
        if demo is None:
            task, settings, languages, examples = TRANSLATION, self.settings, [], []
            summary, most = "There is no model yet: load one below.", None
        else:
            settings = demo.settings
            if demo.name == self.shelf.name:
                given = {name: getattr(self.settings, name) for name in ("source_lang", "target_lang", "source_prefix")}
                settings = replace(settings, **{name: value for name, value in given.items() if value})
            task, languages, examples = demo.task, demo.languages, [[example] for example in demo.examples]
            summary = demo.summary
            most = demo.count_most_characters(self.settings.max_source_tokens)
        verb, result = _WORDS[task.name]
        what = "One sentence a line" if task is TRANSLATION else "A text"
        return {
            "heading": {"value": f"# {verb.capitalize()}, and see where the model looks"},
            "summary": {"value": summary},
            "text": {"placeholder": f"{what}; Shift+Enter to {verb} it", "max_length": most},
            "button": {"value": verb.capitalize()},
            "translation": {"label": result},
            "n_best": {"headers": ["Rank", "Score", result]},
            "examples": {"samples": examples, "visible": bool(examples)},
            "languages": {"visible": bool(languages)},
            # Not None, which would oblige those who ask through the API to name languages to a model that has none.
            "source_lang": {"choices": languages, "value": settings.source_lang or ""},
            "target_lang": {"choices": languages, "value": settings.target_lang or ""},
            "num_beams": {"value": settings.num_beams},
            # Gradio refuses what is beyond a slider's ends, the model's own value too.
            "length_penalty": {
                "value": settings.length_penalty,
                "minimum": min(0, settings.length_penalty),
                "maximum": max(3, settings.length_penalty),
            },
            "source_prefix": {"value": settings.source_prefix, "max_length": most},
        }

    def _add_text(self, look: dict[str, dict[str, Any]]) -> None:
        gr = self.gr
        self.text = gr.Textbox(label="Text", lines=2, max_lines=8, elem_id="text", **look["text"])
        with gr.Row(**look["languages"]) as self.languages:
            common = {"allow_custom_value": True, "interactive": True, "min_width": 140}
            self.source_lang = gr.Dropdown(label="From", elem_id="source-lang", **common, **look["source_lang"])
            self.target_lang = gr.Dropdown(label="To", elem_id="target-lang", **common, **look["target_lang"])
        self.button = gr.Button(variant="primary", elem_id="translate", **look["button"])
        gallery = {"components": [self.text], "layout": "gallery", **look["examples"]}
        self.examples = gr.Dataset(label="Examples", elem_id="examples", **gallery)

    def _add_search(self, look: dict[str, dict[str, Any]]) -> None:
        gr = self.gr
        with gr.Row():
            beams = {"minimum": 1, "maximum": MAX_BEAMS, "step": 1, "buttons": [], **look["num_beams"]}
            self.num_beams = gr.Slider(label="Beam size", info="1 is greedy search.", elem_id="beams", **beams)
            penalty = {"step": 0.1, "buttons": [], **look["length_penalty"]}
            label, info = "Length penalty", "More: longer translations."
            self.length_penalty = gr.Slider(label=label, info=info, elem_id="length-penalty", **penalty)

    def _add_results(self, look: dict[str, dict[str, Any]]) -> None:
        gr = self.gr
        shown = {"lines": 2, "interactive": False, "buttons": ["copy"], **look["translation"]}
        self.translation = gr.Textbox(elem_id="translation", **shown)
        columns = {"datatype": ["number", "number", "str"], "column_widths": ["64px", "96px", "100px"]}
        label = "The best, with their log-probability divided by the length penalty"
        table = {"interactive": False, "wrap": True, "buttons": [], **columns, **look["n_best"]}
        self.n_best = gr.Dataframe(label=label, elem_id="n-best", **table)
        self.note = gr.Markdown(label="Remark", elem_id="note")

    def _add_model(self, look: dict[str, dict[str, Any]]) -> None:
        gr = self.gr
        folder, or_folder = ("", "") if self.shelf.others == "hub" else ("out/my-model or ", "Its folder, or its")
        texts = {"placeholder": f"{folder}Helsinki-NLP/opus-mt-en-de", "info": f"{or_folder or 'Its'} name on the Hub."}
        visible = self.shelf.others != "none"
        with gr.Accordion("Model", open=self.shelf.name is None, elem_id="model-settings"):
            self.name = gr.Textbox(label="Model", submit_btn="Load", visible=visible, elem_id="model", **texts)
            self.loaded = gr.Markdown(min_height=40, visible=visible, elem_id="loaded")
            info = "Put before the text, as T5 needs it: translate English to German:"
            self.source_prefix = gr.Textbox(label="Prefix", info=info, elem_id="prefix", **look["source_prefix"])

    def _connect(self) -> None:
        """Says what happens when a person wants something."""
        gr = self.gr
        asked = [self.text, self.num_beams, self.length_penalty, self.source_lang, self.target_lang, self.source_prefix]
        results = [self.translation, self.n_best, self.note, self.attention]
        request = {
            "fn": for_people(self.translate),
            "inputs": [self.model_name, *asked],
            "outputs": results,
            # Where it is seen that the page is at work, or failed.
            "show_progress_on": [self.translation, self.n_best, self.attention],
            "concurrency_id": "translate",
            "concurrency_limit": 1,
        }
        at_once = {"api_visibility": "private", "queue": False, "show_progress": "hidden"}
        # First of all, lest results of an earlier text stand beside this one if it fails.
        begun = gr.on([self.button.click, self.text.submit], lambda: _EMPTY, outputs=results, **at_once)
        begun.then(api_name="translate", **request)
        shown = [self.text, *results]
        chosen = self.examples.click(lambda example: (example[0], *_EMPTY), self.examples, shown, **at_once)
        chosen.then(api_visibility="private", **request)
        if self.shelf.others != "none":
            parts = [self.loaded, self.model_name, *(getattr(self, name) for name in self._look(None)), *results]
            options = {"show_progress_on": self.loaded, "concurrency_id": "load", "concurrency_limit": 1}
            self.name.submit(for_people(self.show_model), self.name, parts, api_visibility="private", **options)

    def translate(
        self,
        model_name: str | None,
        text: str | None,
        num_beams: Any,
        length_penalty: Any,
        source_lang: str | None,
        target_lang: str | None,
        source_prefix: str | None,
    ) -> tuple[str, list[list[Any]], str, str]:
        """Translates a text, and shows what the model looked at."""
        most = self.settings.max_source_tokens
        settings = Settings(num_beams, length_penalty, source_lang, target_lang, source_prefix or "", most)
        answer = translate_text(self.shelf.get(model_name), text or "", settings)
        found = enumerate(answer.translations, start=1)
        rows = [[rank, "" if score is None else round(score, 4), text] for rank, (text, score) in found]
        frame = _NO_ATTENTION if answer.attention is None else _frame(answer.attention)
        return answer.text, rows, f"{answer.seconds:.2f} seconds. {answer.note}", frame

    def show_model(self, name: str) -> list[Any]:
        """Fits the page to another model, and empties the results."""
        demo = self.shelf.get(name)
        look = [self.gr.update(**arguments) for arguments in self._look(demo).values()]
        return [f"{as_code(demo.name)} is loaded.", demo.name, *look, *_EMPTY]


def _frame(attention: "AttentionMap") -> str:
    """The attention's own page, in a frame from which it reaches nothing around it."""
    content = html.escape(attention_page(attention, title="Where the model looks"))
    return f'<iframe class="attention-frame" title="Attention" sandbox="allow-scripts" srcdoc="{content}"></iframe>'
