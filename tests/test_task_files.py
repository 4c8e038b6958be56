"""Tasks of one's own as YAML files: whatever lm-eval makes of an odd one, it is one sentence."""

import pytest

from fc_eval.errors import FcEvalError
from fc_eval.evaluate import tasks
from fc_eval.evaluate.spec import TaskSpec

ODD_DEFINITIONS = {
    "no YAML": "a: [",
    "text": "just text",
    "empty": "",
    "no data set": "task: mine\n",
    "data set a number": "task: mine\ndataset_path: 7\n",
    "include of nothing": "task: mine\ninclude: nowhere.yaml\n",
    "output type": "task: mine\ndataset_path: json\noutput_type: foo\n",
    "unknown key": "task: mine\nfoo: bar\n",
}


@pytest.mark.parametrize("case", ODD_DEFINITIONS)
def test_an_odd_task_file_is_one_sentence(tmp_path, case):
    file = tmp_path / "own.yaml"
    file.write_text(ODD_DEFINITIONS[case])
    with pytest.raises(FcEvalError, match=r"task file .*own\.yaml' cannot be used \(") as caught:
        tasks._prepare(TaskSpec("own", str(file)), None)
    assert "\n" not in str(caught.value)
