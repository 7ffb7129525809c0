"""The figures that each page must show: page → ids, in the order of the page. A page that is not named has none."""

EXPECTED_FIGURES: dict[str, tuple[str, ...]] = {}
