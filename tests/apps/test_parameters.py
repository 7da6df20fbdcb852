"""Names of the choices in a link: one scheme for all pages."""

from t2lens.apps.generation import GENERATION
from t2lens.apps.views import PAGES

WORDS = {"depth-routing": "routing_", "gates": "gates_", "lens": "lens_", "edits": "edits_", "analyses": "analysis"}


def test_choices_of_a_page_begin_with_its_word() -> None:
    for page in PAGES:
        own = [each.key for each in page.parameters if each not in GENERATION]
        if page.default:
            assert not any(key.startswith(word) for key in own for word in (*WORDS.values(), "write_"))
        else:
            assert all(key.startswith(WORDS[page.path]) for key in own), own
    assert all(each.key.startswith("write_") for each in GENERATION)


def test_no_two_pages_have_one_choice() -> None:
    keys = [each.key for page in PAGES for each in dict.fromkeys(page.parameters) if each not in GENERATION]
    taken = ("a", "b", "prompt", "prompt_b", "align", "edits", "node", "view")
    assert len({*keys, *taken}) == len(keys) + len(taken)
