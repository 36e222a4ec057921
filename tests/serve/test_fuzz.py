"""Mutated pictures and requests: 500 here, 10,000 with `make fuzz`."""

from tests.helpers.fuzz import check, fuzz
from tests.helpers.serving import models_of, serving


def test_mutated_pictures_and_requests(runs):
    with serving(models_of(runs["classes"], runs["masks"]), seconds=2) as served:
        found = fuzz(served.port, 500)
        assert found.total() == 500
        assert check(found, served.port) == []
        assert {200, 415, 422} <= {*found}  # it is no wall: some pass, some are refused for what they are
        assert served.service.admission.bytes == 0
        assert served.service.decoders.ended == 0
