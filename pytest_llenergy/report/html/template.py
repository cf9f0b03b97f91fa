# SPDX-License-Identifier: Apache-2.0
"""Fill the templates of pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_llenergy.record.text import one_line
from pytest_llenergy.report.html.svg import Sheet

if TYPE_CHECKING:
    from jinja2 import Environment


def render_template(name: str, sheet: Sheet, **variables: Any) -> str:
    """Fill a template.

    Args:
        name: File in the folder ``templates``.
        sheet: The sheet of the page's figures.
        variables: Variables of the template.
    """
    return _create_environment().get_template(name).render(**variables, **_style(sheet))


def _create_environment() -> Environment:
    """Create the template environment, which escapes every value and puts it on one line.

    Only markup that this package generates is left as it is.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    def finalize(text: Any) -> Any:
        return one_line(text) if type(text) is str else text

    return Environment(
        loader=PackageLoader("pytest_llenergy.report.html"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _style(sheet: Sheet) -> dict[str, str]:
    """Return the style sheet, and a content security policy that allows nothing else."""
    import base64
    import hashlib
    from importlib.resources import files

    from markupsafe import Markup

    sheet_text = files("pytest_llenergy.report.html").joinpath("templates/page.css").read_text("utf-8")
    style = f"\n{sheet_text}{sheet.css}"
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    return {"style": Markup(style), "policy": policy}
