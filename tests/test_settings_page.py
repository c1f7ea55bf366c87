"""docs/settings.md says what the configurations are."""

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def test_the_page_of_settings_is_that_of_the_configurations() -> None:
    made = runpy.run_path(str(DOCS / "settings_page.py"))
    assert (DOCS / "settings.md").read_text(encoding="utf-8") == made["page"](), "run: python docs/settings_page.py"
    assert all(
        f"| `{name}` |" in made["page"]() for name in ("without_batch_norm", "restyled", "drawings", "isolation")
    )
