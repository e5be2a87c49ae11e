"""Outcomes as JUnit XML, for readers of test reports."""

from __future__ import annotations

import collections
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence

from anymla.testing.conformance.runner import FAILED, NOT_APPLICABLE, Outcome


def junit_xml(outcomes: Sequence[Outcome]) -> str:
    """Format one test suite with a test case per outcome."""
    counts = collections.Counter(outcome.status for outcome in outcomes)
    suite = ElementTree.Element(
        "testsuite",
        name="anymla conformance",
        tests=str(len(outcomes)),
        failures=str(counts[FAILED]),
        skipped=str(counts[NOT_APPLICABLE]),
        errors="0",
        time=f"{sum(outcome.seconds for outcome in outcomes):.2f}",
    )
    for outcome in outcomes:
        case = ElementTree.SubElement(
            suite,
            "testcase",
            classname=f"anymla.conformance.{outcome.subject}",
            name=f"{outcome.case_id} {outcome.story}",
            time=f"{outcome.seconds:.2f}",
        )
        if outcome.status == FAILED:
            ElementTree.SubElement(case, "failure", message=outcome.detail)
        elif outcome.status == NOT_APPLICABLE:
            ElementTree.SubElement(case, "skipped", message=outcome.detail)
        if outcome.notes:
            ElementTree.SubElement(case, "system-out").text = "\n".join(outcome.notes)
    suites = ElementTree.Element("testsuites")
    suites.append(suite)
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"
