# SPDX-License-Identifier: Apache-2.0
"""Emissions and cost follow from the energy: known answers, and where users see them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from pytest_llenergy.cli import main
from pytest_llenergy.record.carbon_and_cost import DERIVED, Price, Rates, parse_carbon, parse_price, rescale
from pytest_llenergy.record.record import Metric
from pytest_llenergy.record.report import encode_report, json_schema
from pytest_llenergy.report.columns import COLUMNS

from ..compare.runs import record_of, report_of

RATES = Rates(400.0, Price(0.30, "EUR"))

#: A kilowatt-hour, and half a joule for each token.
METRICS = {
    "energy_j": Metric(
        value=3.6e6, unit="J", uncertainty=3.6e4, spread=1.8e4, uncertainty_absolute=7.2e5, n=6
    ),
    "energy_per_output_token_j": Metric(value=0.5, unit="J/token", uncertainty=0.05, n=6),
}

TEST = "def test_it(energy):\n    energy(lambda: sum(range(10**6)))\n"


def test_a_kilowatt_hour_emits_and_costs_what_the_options_say() -> None:
    derived = RATES.derive(METRICS)
    assert derived["carbon_g"] == Metric(
        value=pytest.approx(400.0),  # type: ignore[arg-type]
        unit="gCO2e",
        uncertainty=pytest.approx(4.0),  # type: ignore[arg-type]
        spread=pytest.approx(2.0),  # type: ignore[arg-type]
        uncertainty_absolute=pytest.approx(80.0),  # type: ignore[arg-type]
        n=6,
        source="400 gCO2e/kWh (--energy-carbon)",
    )
    cost = derived["cost"]
    assert cost.value == pytest.approx(0.30)
    assert cost.unit == "EUR"
    assert cost.uncertainty_absolute == pytest.approx(0.06)
    assert cost.source == "0.3 EUR/kWh (--energy-price)"
    assert {name: derived[name] for name in METRICS} == METRICS


def test_a_million_tokens_of_half_a_joule_are_500_kilojoules() -> None:
    derived = RATES.derive(METRICS)
    carbon = derived["carbon_per_million_output_tokens_g"]
    cost = derived["cost_per_million_output_tokens"]
    assert (carbon.unit, cost.unit) == ("gCO2e/Mtoken", "EUR/Mtoken")
    assert carbon.value == pytest.approx(400 / 7.2)
    assert cost.value == pytest.approx(0.30 / 7.2)
    assert carbon.uncertainty == pytest.approx(carbon.value / 10)  # type: ignore[operator]


def test_missing_joules_pass_on_their_reason() -> None:
    lost = {
        "energy_j": Metric(value=None, unit="J", reason="no meter"),
        "energy_per_output_token_j": Metric(value=None, unit="J/token", reason="no tokens"),
    }
    derived = RATES.derive(lost)
    assert (derived["carbon_g"].value, derived["carbon_g"].reason) == (None, "no meter")
    assert set(derived) == {*lost, "carbon_g", "cost"}


def test_other_energies_keep_the_rates() -> None:
    halved = {name: msgspec.structs.replace(each, value=each.value / 2) for name, each in METRICS.items()}  # type: ignore[operator]
    found = rescale(RATES.derive(METRICS), halved)
    assert found["carbon_g"].value == pytest.approx(200)
    assert found["cost"].source == "0.3 EUR/kWh (--energy-price)"
    assert rescale(METRICS, halved) == {}


@pytest.mark.parametrize(
    ("text", "price"),
    [
        ("0.30", Price(0.30)),
        ("0.30 EUR", Price(0.30, "EUR")),
        (".3EUR/kWh", Price(0.30, "EUR")),
        ("$0.12", Price(0.12, "$")),
        ("30 ct / kWh", Price(30.0, "ct")),
    ],
)
def test_a_price_may_have_a_currency(text: str, price: Price) -> None:
    assert parse_price(text) == price


@pytest.mark.parametrize(
    "text", ["", "EUR", "-1", "0,30", "1e3 EUR", "€ 1 EUR", "0.3 EUR/MWh", "1 \x1b", "9" * 400]
)
def test_what_is_no_price_is_refused(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"^needs the price of a kilowatt-hour, such as 0\.30 or '0\.30 EUR'$"
    ):
        parse_price(text)


@pytest.mark.parametrize("text", ["", "-1", "nan", "inf", "DE"])
def test_what_are_no_grams_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^needs the grams of CO2e"):
        parse_carbon(text)


def test_the_run_shows_and_keeps_them(
    quick: pytest.Pytester, read_report: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    quick.makepyfile(TEST)
    with (quick.path / "tox.ini").open("a") as ini:
        ini.write("\nenergy_carbon = 400\n")
    ran = quick.runpytest("--energy-report", "--energy-price=0.30 EUR", "--junitxml=junit.xml")
    ran.assert_outcomes(passed=1)
    ran.stdout.fnmatch_lines(["test * CO2e ± u * cost ± u", "test_it * [nµm]g * EUR"])
    report = read_report()
    jsonschema.validate(report, json_schema())
    metrics = report["records"][0]["metrics"]
    energy, carbon, cost = metrics["energy_j"], metrics["carbon_g"], metrics["cost"]
    assert carbon["value"] == pytest.approx(energy["value"] * 400 / 3.6e6)
    assert carbon["uncertainty"] == pytest.approx(energy["uncertainty"] * 400 / 3.6e6)
    assert cost["value"] == pytest.approx(energy["value"] * 0.30 / 3.6e6)
    assert "carbon_per_million_output_tokens_g" not in metrics
    assert 'name="llenergy.carbon_g"' in (quick.path / "junit.xml").read_text()


def test_without_the_options_there_are_none(
    quick: pytest.Pytester, read_report: Callable[..., dict[str, Any]]
) -> None:
    quick.makepyfile(TEST)
    ran = quick.runpytest("--energy-report")
    ran.stdout.no_fnmatch_line("*CO2e*")
    assert not set(DERIVED) & set(read_report()["records"][0]["metrics"])


def test_a_wrong_rate_ends_the_run_with_one_line(quick: pytest.Pytester) -> None:
    for option, problem in (("carbon=DE", "needs the grams of CO2e of"), ("price=EUR", "needs the price of")):
        ran = quick.runpytest(f"--energy-{option}")
        assert ran.ret == pytest.ExitCode.USAGE_ERROR
        ran.stderr.fnmatch_lines([f"ERROR: --energy-{option}: {problem} a kilowatt-hour, *"])


def test_no_gate_uses_them(quick: pytest.Pytester, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.json", "b.json"):
        Path(quick.path, name).write_bytes(encode_report(report_of(record_of())))
    assert main(["compare", "a.json", "b.json", "--metric=carbon_g"]) == 2
    assert capsys.readouterr().err == (
        "llenergy compare: carbon_g is energy_j times a constant; use energy_j instead\n"
    )
    quick.makepyfile("import pytest\n@pytest.mark.energy_gate(metric='cost', budget='1 EUR')\n" + TEST)
    quick.runpytest().stdout.fnmatch_lines(["*unknown metric 'cost'*"])


def test_a_kept_report_takes_rates_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    record = record_of()
    Path("a.json").write_bytes(encode_report(report_of(record)))
    assert main(["report", "a.json", "--carbon=720", "--price=$36"]) == 0
    shown, rates = capsys.readouterr().out, Rates(720.0, Price(36.0, "$"))
    # Five joules are 1/720000 kWh.
    carbon, cost = (COLUMNS[name].cell(rates.add_to(record)) for name in ("carbon_g", "cost"))
    assert carbon in shown
    assert carbon == "1.00 ± 0.10 mg"
    assert cost in shown
    for form, text in (("markdown", " 1.00 &#177; 0.10 mg |"), ("html", "gCO2e/Mtoken")):
        if form == "html":
            pytest.importorskip("matplotlib")
        assert main(["report", "a.json", "--carbon=720", f"--format={form}"]) == 0
        assert text in capsys.readouterr().out


def test_other_tools_get_no_emissions_as_a_series(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Except as plain data: they change as the energy does."""
    monkeypatch.chdir(tmp_path)
    Path("a.json").write_bytes(encode_report(report_of(RATES.add_to(record_of()))))
    for form, has in {
        "bencher": False,
        "openmetrics": False,
        "github-action-benchmark": False,
        "csv": True,
        "pytest-benchmark": True,
    }.items():
        assert main(["export", "a.json", f"--format={form}"]) == 0
        assert ("carbon" in capsys.readouterr().out) == has, form


def test_a_foreign_unit_cannot_break_the_table() -> None:
    cost = Metric(value=2.0, unit="\x1b[31m" + "x" * 200, n=1)
    cell = COLUMNS["cost"].cell(record_of(metrics={"cost": cost}))
    assert cell.isprintable()
    assert len(cell) < 20


def test_yen_are_no_joules() -> None:
    cost = Metric(value=0.02, unit="JPY", n=1)
    assert COLUMNS["cost"].cell(record_of(metrics={"cost": cost})) == "0.02 JPY"
