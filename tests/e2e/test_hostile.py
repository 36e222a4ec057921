"""Hostile input through the whole of `weft`: what the other files test piece by piece, and what none of them does.

Where each line of the reliability checklist is tested (the last test here looks whether these tests exist):

C1  test_convert.test_code_in_a_pickle_never_runs test_convert.test_code_in_a_bare_pickle_never_runs
    test_hostile.test_code_in_weights_never_runs test_hostile.test_code_in_a_state_never_runs
    test_read.test_arrays_with_objects_are_not_unpickled
C2  test_convert.test_there_is_one_torch_load_and_it_is_safe test_convert.test_folder_round_trip
C3  test_convert.test_damaged_files test_convert.test_a_file_cut_anywhere
    test_predict.test_what_cannot_be_opened_is_told_in_one_line test_loop.test_damaged_state_is_refused_in_one_line
    test_hostile.test_damaged_weights_get_one_line test_hostile.test_weights_of_another_architecture_are_named
C4  test_hostile.test_weights_for_something_else_adapt_and_say_so test_ceit.test_positions_are_resized_on_the_way_in
    test_host.test_other_classes_leave_the_head
C5  test_hostile.test_damaged_weights_get_one_line test_shards.test_members_that_point_out_of_the_archive_are_refused
    test_shards.test_any_damage_is_survived_or_told
C6  test_loop.test_state_is_whole_whenever_the_writer_is_killed test_resume.test_kills_change_no_bit
    test_convert.test_saved_files_are_on_disk_before_they_get_their_names
C7  test_loop.test_full_disk_loses_nothing test_hostile.test_a_disk_that_is_really_full_loses_nothing
    test_hostile.test_a_replaced_state_leaves_the_disk
    test_hostile.test_the_file_that_was_given_is_named_where_the_disk_is_full
    test_hostile.test_where_explain_cannot_write_is_said_before_it_computes
    test_hostile.test_a_full_disk_keeps_nothing_by_halves
C8  test_hostile.test_state_holds_all_that_a_run_depends_on test_resume.test_interrupted_run_ends_with_the_same_bits
    test_sampler.test_steps_are_pure_functions test_augment_picture.test_augmentation_is_a_function_of_the_seed
C9  test_loop.test_two_runs_never_share_a_folder test_loop.test_folder_of_another_run_is_refused
    test_distributed.test_folder_in_use_is_refused_in_all test_hostile.test_a_folder_where_a_run_failed_early_is_free
R1  test_resume.test_interrupted_run_ends_with_the_same_bits test_resume.test_other_settings_resume_exactly_too
    test_resume.test_number_of_workers_changes_nothing test_resume.test_kills_change_no_bit
    test_dense_resume.test_interrupted_run_ends_with_the_same_bits test_dense_resume.test_kills_change_no_bit
R2  test_resume.test_interrupted_run_ends_with_the_same_bits test_resume.test_kills_change_no_bit
R3  test_loop.test_signal_saves_and_says_how_to_go_on test_loop.test_second_signal_ends_at_once
    test_distributed.test_signal_stops_all_at_the_same_step
R4  test_loop.test_changed_settings_are_refused_and_named_or_accepted_on_request
    test_loop.test_changed_pictures_are_refused test_distributed.test_another_number_of_processes_goes_on
R5  test_hostile.test_a_run_of_a_gpu_goes_on_without_one
N1  test_loop.test_batch_without_finite_gradient_is_undone_and_left_out
    test_loop.test_run_stops_when_nan_comes_again_and_again test_distributed.test_nan_in_one_process_is_undone_in_all
    test_dense_resume.test_batch_without_finite_gradient_is_undone_and_left_out
N2  test_loop.test_weights_that_are_not_finite_are_never_the_best
    test_loop.test_batch_without_finite_gradient_is_undone_and_left_out
N3  test_loop.test_out_of_memory_halves_what_is_computed_at_once_and_nothing_else
    test_distributed.test_lack_of_memory_in_one_process_ends_all_and_resuming_halves
    test_distributed.test_torchrun_goes_on_with_half_as_many_pictures_at_once
    test_dense_resume.test_out_of_memory_halves_what_is_computed_at_once
    test_loop.test_out_of_memory_with_one_picture_is_said test_hostile.test_what_cannot_work_gets_one_line
N4  test_loader.test_memory_of_workers_does_not_grow test_loader.test_small_shared_memory_is_told_before_training
    test_hostile.test_small_shared_memory_is_told_by_the_command
I1  test_read.test_bombs_are_refused_before_they_explode test_read.test_hostile_files_get_one_line
    test_hostile.test_frames_count_as_pixels test_check.test_too_large_pictures_are_named_and_not_decoded
    test_hostile.test_threads_of_pixels_do_not_grow
I2  test_read.test_hostile_files_get_one_line test_hostile.test_bad_pictures_are_left_out_and_listed
    test_hostile.test_too_many_bad_pictures_stop test_hostile.test_pictures_that_turn_out_bad_are_listed_or_stop
    test_hostile.test_validation_without_a_readable_picture test_check.test_severities_and_reasons
I3  test_read.test_exif_rotation test_read.test_rotation_of_16_bit_colour test_pairs.test_masks_and_boxes_follow_exif
I4  test_read.test_lossless_formats_keep_every_value test_read.test_modes_without_alpha_follow_pillow
    test_read.test_alpha_is_laid_over_white test_read.test_cmyk_of_jpegs_is_not_inverted
    test_read.test_grey_of_16_bits_keeps_its_range test_read.test_colour_of_16_bits_keeps_its_range
    test_read.test_values_beyond_16_bits test_hostile.test_odd_pictures_are_all_used
I5  test_read.test_first_frame_of_several test_read.test_profiles_are_named
    test_check.test_every_planted_problem_is_found_and_nothing_else
I6  test_hostile.test_other_formats_are_refused test_read.test_hostile_files_get_one_line
I7  test_folders.test_odd_names_are_read_shown_and_stored test_folders.test_link_loops_end_and_broken_links_are_noted
    test_folders.test_what_the_system_leaves_behind_is_ignored_and_noted test_hostile.test_odd_pictures_are_all_used
I8  test_open.test_the_data_is_never_written_to test_check.test_data_is_never_written
    test_hostile.test_the_data_is_as_it_was test_hostile.test_what_cannot_work_gets_one_line
D1  test_folders.test_surprises_are_noted test_open.test_one_class_cannot_be_trained_but_evaluated
    test_folders.test_numbers_count_naturally test_hostile.test_class_of_validation_alone_is_noted
D2  test_check_masks.test_hostile_mask test_check_masks.test_hostile_mask_that_is_there_from_the_start
    test_mask_values.test_unknown_values_are_named_and_counted test_mask_values.test_mixed_kinds
    test_mask_values.test_palette_counts_by_value test_mask_values.test_sizes_that_differ_are_named
    test_mask_values.test_masks_that_cannot_be_read test_dense_runs.test_hostile_masks_stop_before_training
D3  test_check_boxes.test_faults_of_an_object test_check_boxes.test_corners_written_as_sides_are_suspected
    test_check_boxes.test_sides_written_as_corners_are_suspected test_check_boxes.test_classes_off_by_one_are_suspected
    test_check_boxes.test_pictures_and_ids_that_do_not_match test_coco.test_gaps_crowds_shapes_and_areas
    test_shapes.test_shapes_that_cannot_be_drawn_say_why test_coco.test_damage_is_survived_or_told
    test_dense_runs.test_hostile_boxes_are_named_before_training
D4  test_check.test_every_planted_problem_is_found_and_nothing_else test_hostile.test_leaks_stop_unless_allowed
    test_dense_runs.test_copies_on_both_sides_stop
D5  test_hostile.test_very_few_pictures_train test_split.test_very_few_pictures
    test_hostile.test_what_cannot_work_gets_one_line test_dense_runs.test_very_few_pictures_train

And what that checklist does not have, found by people who were careless or meant harm:

O1  Outputs that are files replace nothing but what Weft wrote, never data, never an input.
    test_outputs.test_nothing_of_others_is_overwritten test_outputs.test_what_weft_wrote_is_written_again
    test_outputs.test_pictures_that_a_run_was_trained_on_are_never_replaced
O2  YAML and JSON that are nested deeply, or that aliases make very large, end in one line.
    test_hostile.test_documents_nested_deeply_get_one_line test_hostile.test_documents_that_grow_get_one_line
    test_documents.test_what_is_no_document_gets_one_line
    test_hostile.test_documents_that_were_changed_get_one_line
O3  Pipes, sockets and devices are never waited for; links that lead round are left out and listed.
    test_hostile.test_pipes_devices_and_sockets_are_not_waited_for
    test_hostile.test_links_that_lead_round_are_left_out_and_listed
    test_hostile.test_a_pipe_in_the_place_of_a_file_is_not_waited_for
O4  Escape sequences in names never reach the terminal.
    test_hostile.test_escape_sequences_never_reach_the_terminal test_outputs.test_tables_on_a_terminal_are_clean
    test_house.test_rule_is_kept
O5  Weights that are no numbers are refused, and JSON never has a NaN.
    test_hostile.test_weights_that_are_no_numbers_are_refused test_documents.test_json_has_no_nan
    test_hostile.test_answers_that_are_no_numbers_are_said_and_json_stays_json
O6  Data that were moved are found again; classes that are called otherwise are matched by hand, never by guessing.
    test_moved.test_a_moved_copy_is_evaluated_by_the_runs_own_split test_moved.test_a_run_goes_on_where_its_data_are_now
    test_moved.test_classes_that_match_are_measured_and_the_others_named
O7  Exit codes are those that shells expect.
    test_hostile.test_exit_code_after_a_signal test_hostile.test_exit_code_of_whatever_was_interrupted
    test_hostile.test_pipes_devices_and_sockets_are_not_waited_for test_ablate.test_failed_cells_are_said
    test_search.test_networks_that_fail_are_said test_predict.test_predict_fails_where_everything_does
O8  Commands that are recommended can be pasted, whatever the paths in them.
    test_hostile.test_the_command_that_is_recommended_works test_house.test_rule_is_kept
O9  Numbers do not flatter: no copy of what validates trains, what nobody could learn does not count, a temperature that
    does not help is 1, a result has beside it what guessing reaches, one class is nothing to tell apart.
    test_copies.test_no_picture_that_validates_has_a_copy_that_trains
    test_copies.test_the_error_names_what_the_data_itself_leaks
    test_unlearned.test_a_class_that_only_validates_is_not_measured
    test_classify_evaluate.test_a_temperature_that_does_not_help_is_1
    test_coco.test_two_categories_of_one_name_are_found
    test_outlook.test_the_commonest_class_and_guessing_stand_beside_the_result
    test_outlook.test_too_little_training_is_told test_outlook.test_a_curve_that_still_rises_is_told
    test_check_masks.test_only_one_class test_check_boxes.test_crowds_alone_are_nothing_to_learn
O10 Whatever the data, the defaults train: 16 bits and floats, boxes without outlines.
    test_engine.test_other_channels_and_depths_train test_wide.test_policies_keep_the_depth
    test_dense_runs.test_demo_recipe_takes_boxes_without_outlines
O11 A busy machine neither makes steps many times slower nor breaks a limit of time.
    test_pace.test_threads_that_are_fastest_are_chosen test_cli.test_threads_soon_sleep
    test_clock.test_a_run_ends_with_its_minutes_whatever_the_trial_said
    test_clock.test_a_machine_that_collapses_is_told_and_the_time_kept
O12 Without a network, one line comes soon and nothing stays behind.
    test_initial.test_without_a_network_one_line_comes_soon_and_no_folder_stays
    test_initial.test_weights_in_the_cache_need_no_network
O13 Files that may not be read are said to be, not to be damaged or missing.
    test_hostile.test_files_that_may_not_be_read_are_said_to_be
O14 Names and paths of any length are said in a line that can be read.
    test_hostile.test_very_long_names_get_one_short_line
"""

import ast
import contextlib
import copy
import errno
import hashlib
import io
import json
import os
import pickle
import re
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import weft
from tests.helpers.places import ROOT
from tests.helpers.small_runs import EVERYTHING_RANDOM, TINY, differences, make_pictures, make_squares, tiny_run
from weft.cli.app import main
from weft.data import loader
from weft.engine import loop
from weft.engine.lock import STATE
from weft.engine.log import read_rows
from weft.engine.loop import Trainer
from weft.engine.state import read_header
from weft.files import write_text
from weft.run.session import RunSession

OPTIONS = {name.replace("__", "."): value for name, value in TINY.items() if name != "quiet"}
RNG = np.random.default_rng(0)

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(monkeypatch, capsys) -> Command:
    """Runs `weft`; returns exit code, standard output and standard error."""

    def run(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["weft", *map(str, args)])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        return code, *capsys.readouterr()

    return run


def options(**changes: object) -> list[str]:
    """A tiny run on the command line; a setting that is None is left out."""
    settings = OPTIONS | {name.replace("__", "."): value for name, value in changes.items()}
    names = {name: "--" + name.replace("_", "-" if "." not in name else "_") for name in settings}
    return [word for name, value in settings.items() if value is not None for word in (names[name], str(value))]


def refused(answer: tuple[int, str, str], *words: str) -> None:
    """Exit code 2 and one line on standard error with all `words`."""
    code, _, err = answer
    assert code == 2, err
    assert len(err.splitlines()) == 1, err
    assert err.startswith("weft: ")
    assert all(word in err for word in words), err


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("data") / "pictures")


@pytest.fixture(scope="module")
def run(pictures, tmp_path_factory) -> Path:
    return tiny_run(pictures, tmp_path_factory.mktemp("runs") / "run", epochs=1, run__ema=0.9).folder


@pytest.fixture
def broken(run, tmp_path) -> Path:
    """A copy of the run to do harm to."""
    return Path(shutil.copytree(run, tmp_path / "broken"))


# Weights and states -----------------------------------------------------------------------------------------------


class Bomb:
    """A pickle that would create a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def swapped(path: Path, bomb: Bomb) -> None:
    """A good checkpoint in whose archive the pickle is another one."""
    torch.save({"weights": torch.zeros(3)}, path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, pickle.dumps(bomb, protocol=2) if name.endswith("data.pkl") else content)


EVIL: dict[str, Callable[[Path, Bomb], Any]] = {
    "zip": lambda path, bomb: torch.save({"model": bomb}, path),
    "legacy": lambda path, bomb: torch.save({"model": bomb}, path, _use_new_zipfile_serialization=False),
    "swapped": swapped,
    "protocol 4": lambda path, bomb: path.write_bytes(pickle.dumps(bomb, protocol=4)),
}


@pytest.mark.parametrize("kind", EVIL)
def test_code_in_weights_never_runs(command, pictures, broken, tmp_path, kind):
    """As --init, as a model folder with the name of a pickle, and as a pickle with the name of safetensors."""
    trace = tmp_path / "trace"
    EVIL[kind](tmp_path / "evil.pt", Bomb(trace))
    words = ["posix.system"] if kind != "protocol 4" else []  # at which torch's reader gives up before it sees a name
    refused(command("train", pictures, *options(init=tmp_path / "evil.pt"), "--out", tmp_path / "a"), "evil.pt", *words)
    (broken / "model.safetensors").unlink()
    shutil.copy(tmp_path / "evil.pt", broken / "pytorch_model.bin")
    refused(command("train", pictures, *options(init=broken), "--out", tmp_path / "b"), "pytorch_model.bin", *words)
    refused(command("predict", broken, pictures), "model.safetensors missing")
    shutil.copy(tmp_path / "evil.pt", broken / "model.safetensors")
    for answer in (
        command("predict", broken, pictures),
        command("eval", broken),
        command("train", pictures, *options(init=broken), "--out", tmp_path / "c"),
        command("train", pictures, *options(teacher=broken), "--out", tmp_path / "d"),
    ):
        refused(answer, "model.safetensors")
    assert not trace.exists()


def test_code_in_a_state_never_runs(command, broken, tmp_path):
    EVIL["zip"](broken / STATE, Bomb(tmp_path / "trace"))
    refused(command("train", "--resume", broken), "last.safetensors")
    assert not (tmp_path / "trace").exists()


def with_header(content: bytes, change: Callable[[dict[str, Any], list[str]], object]) -> bytes:
    """A safetensors file in whose header `change` was made."""
    (length,) = struct.unpack("<Q", content[:8])
    header = copy.deepcopy(json.loads(content[8 : 8 + length]))
    change(header, [key for key in header if key != "__metadata__"])
    changed = json.dumps(header).encode()
    return struct.pack("<Q", len(changed)) + changed + content[8 + length :]


def flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 0x80]) + content[place + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "zero length": lambda content: b"",
    "cut": lambda content: content[:-10],
    "cut header": lambda content: content[:50],
    "flipped length": lambda content: flipped(content, 2),
    "flipped header": lambda content: flipped(content, 30),
    "absurd header": lambda content: struct.pack("<Q", 2**60) + content[8:],
    "absurd offset": lambda c: with_header(c, lambda header, keys: header[keys[0]].update(data_offsets=[0, 2**62])),
    "absurd shape": lambda c: with_header(c, lambda header, keys: header[keys[0]].update(shape=[2**40, 2**40])),
    "overlap": lambda c: with_header(c, lambda header, keys: header.update({keys[1]: header[keys[0]]})),
    "hole": lambda c: with_header(c, lambda header, keys: header.pop(keys[0])),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_weights_get_one_line(command, pictures, broken, tmp_path, damage):
    weights = broken / "model.safetensors"
    weights.write_bytes(DAMAGE[damage](weights.read_bytes()))
    refused(command("predict", broken, pictures), str(weights), "expected safetensors")
    refused(command("eval", broken), str(weights))
    refused(command("train", pictures, *options(init=broken), "--out", tmp_path / "out"), str(weights))


def test_weights_of_another_architecture_are_named(command, pictures, broken, tmp_path):
    other = options(init=broken, model="ceit_nano", model__args=None, img_size=32)
    answer = command("train", pictures, *other, "--out", tmp_path / "a")
    refused(answer, "tensors differ, such as", "expected", "found")
    weights = load_file(broken / "model.safetensors")
    weights["stages.0.embed.proj.weight"] = torch.zeros(8, 3, 5, 5)
    save_file(weights, broken / "model.safetensors")
    words = ["stages.0.embed.proj.weight", "expected (8, 3, 7, 7), found (8, 3, 5, 5)"]
    refused(command("predict", broken, pictures), *words)
    refused(command("train", pictures, *options(init=broken), "--out", tmp_path / "b"), *words)


def test_weights_for_something_else_adapt_and_say_so(command, pictures, run, tmp_path):
    """Another number of classes, of channels, another size: each change is said, and the rest is what it was."""
    two = Path(shutil.copytree(pictures, tmp_path / "two"))
    shutil.rmtree(two / "class 2")
    settings = options(init=run, epochs=1, lr=1e-12, optim__warmup_lr=0, optim__min_lr=0, run__ema=0)
    code, out, err = command("train", two, *settings, "--data.channels", "1", "--out", tmp_path / "grey")
    assert code == 0, err
    assert "head.bias and head.weight for other classes: new" in out
    assert "stages.0.embed.proj.weight adapted from 3 to 1 channels" in out
    old, new = (load_file(folder / "model.safetensors") for folder in (run, tmp_path / "grey"))
    same = [key for key in old if old[key].shape == new[key].shape and "running" not in key and old[key].ndim > 1]
    assert len(same) > 20
    for key in same:
        torch.testing.assert_close(new[key], old[key])
    backwards = options(init=tmp_path / "grey")  # 1 channel to 3: nothing to go by
    answer = command("train", pictures, *backwards, "--out", tmp_path / "back")
    refused(answer, "1 tensors differ", "stages.0.embed.proj.weight", "expected (8, 3, 7, 7), found (8, 1, 7, 7)")
    sized = dict(model="ceit_nano", model__args=None, epochs=1, batch=4)
    assert command("train", two, *options(**sized, img_size=32), "--out", tmp_path / "32")[0] == 0
    code, out, err = command(
        "train", two, *options(**sized, img_size=48, init=tmp_path / "32"), "--out", tmp_path / "48"
    )
    assert code == 0, err
    assert "pos_embed.grid resized from (8, 8, 96)" in out


def test_state_holds_all_that_a_run_depends_on(pictures, run):
    """There is no state of generators and schedules: they are functions of seed and step, so those suffice."""
    header, state = read_header(run), load_file(run / STATE)
    weights = load_file(run / "model.safetensors")
    assert {key.removeprefix("model.") for key in state if key.startswith("model.")} == weights.keys()
    assert {key.removeprefix("ema.") for key in state if key.startswith("ema.")} == weights.keys()
    parameters = dict(weft.load(run, device="cpu").model.named_parameters())
    assert {key for key in state if key.startswith("optim.")} == {
        f"optim.{name}:{what}" for name in parameters for what in ("step", "exp_avg", "exp_avg_sq")
    }
    progress = header["progress"]
    assert (progress.step, progress.total_steps, progress.validated) == (3, 3, 1)
    assert progress.best == json.loads((run / "evaluation.json").read_text())["top1"]
    assert progress.scaler == {}  # of fp16 alone
    assert header["classes"] == ["class 0", "class 1", "class 2"]
    assert header["preprocessing"] == json.loads((run / "config.json").read_text())["weft"]["preprocessing"]
    assert header["config"] == (run / "config.yaml").read_text()
    assert "seed: 0" in header["config"]
    assert re.fullmatch(r"[0-9a-f]{16,}", header["fingerprint"])
    assert header["processes"] == 1
    assert torch.__version__.startswith(header["versions"]["torch"])
    assert {"weft", "commit", "python", "timm", "numpy", "pillow"} < header["versions"].keys()


# Disks and folders --------------------------------------------------------------------------------------------------


TWO_EPOCHS = dict(EVERYTHING_RANDOM, epochs=2, run__save_minutes=0)


@pytest.fixture(scope="module")
def whole(pictures, tmp_path_factory) -> Path:
    return tiny_run(pictures, tmp_path_factory.mktemp("whole") / "run", **TWO_EPOCHS).folder


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("wants to mount a disk of 8 MB, which takes an administrator")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk: Path) -> None:
    with open(disk / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


@pytest.mark.parametrize("moment", ["update", "write_best", "finish"])
def test_a_disk_that_is_really_full_loses_nothing(monkeypatch, command, pictures, whole, small_disk, moment):
    """While a state, the best model, or the report is written."""
    place, calls = {"update": Trainer, "write_best": loop, "finish": RunSession}[moment], iter(range(100))
    original = getattr(place, moment)

    def when_full(self, *args):
        if next(calls) == (4 if moment == "update" else 0):
            fill(small_disk)
        return original(self, *args)

    run = small_disk / "run"
    with monkeypatch.context() as patch:
        patch.setattr(place, moment, when_full)
        with pytest.raises(weft.WeftError, match=f"{run} could not be saved: the disk is full.*--resume {run}"):
            tiny_run(pictures, run, **TWO_EPOCHS)
    refused(command("train", "--resume", run, "--quiet"), "the disk is full", f"--resume {run}")
    (small_disk / "filler").unlink()
    assert command("train", "--resume", run, "--quiet")[0] == 0
    assert differences(whole, run) == []
    assert not list(small_disk.rglob(".saving*"))


def test_a_replaced_state_leaves_the_disk(pictures, whole, tmp_path):
    """While a run goes on from it: else a disk is full that has room for three."""
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    mapped = []
    original = Trainer.fit

    def fit(self):
        mapped.extend(line for line in Path("/proc/self/maps").read_text().splitlines() if str(run) in line)
        return original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "fit", fit)
        weft.train(resume=run, quiet=True)
    assert mapped == []


def test_the_file_that_was_given_is_named_where_the_disk_is_full(command, pictures, run, small_disk):
    fill(small_disk)
    answer = command("predict", run, pictures, "--csv", small_disk / "answers.csv", "--device", "cpu")
    refused(answer, f"{small_disk / 'answers.csv'}: No space left")
    assert ".saving" not in answer[2]


@pytest.mark.parametrize(
    "args", [["convert", "WEIGHTS", "--model", "cvt_nano"], ["export", "RUN", "--to", "torch"], ["export", "RUN"]]
)
def test_a_full_disk_keeps_nothing_by_halves(command, monkeypatch, run, small_disk, tmp_path, args):
    """The folder is named, not a temporary one, and is gone."""
    torch.save(timm.create_model("cvt_nano", num_classes=2).state_dict(), tmp_path / "weights.pt")
    monkeypatch.setattr("weft.export.export.write_text", lambda path, text: fill(small_disk) or write_text(path, text))
    if "--to" in args or args[0] == "convert":
        fill(small_disk)
    places = {"RUN": run, "WEIGHTS": tmp_path / "weights.pt"}
    answer = command(*(places.get(word, word) for word in args), "--out", small_disk / "made")
    refused(answer, f"{small_disk / 'made'}", "No space left on device.")
    assert "os error" not in answer[2]
    assert [path.name for path in small_disk.iterdir()] == ["filler"]


@pytest.mark.parametrize("there", [True, False])
def test_an_explanation_that_does_not_fit_on_the_disk_leaves_nothing(
    command, monkeypatch, pictures, run, tmp_path, there
):
    """But a folder that was there before, empty."""

    def full(path, text):
        assert list(path.parent.glob("*.png"))  # there is something to be removed
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("weft.explain.page.write_text", full)
    out = tmp_path / "out"
    code, _, err = command("explain", run, pictures, "--out", out, "--device", "cpu")
    assert code
    assert err.splitlines()[-1].endswith("explain.json: No space left on device.")
    assert not out.exists()
    if there:
        out.mkdir()
    with pytest.raises(OSError, match="No space"):
        weft.load(run, "cpu").explain(pictures).write(out)
    assert out.exists() == there
    assert not there or not list(out.iterdir())


def test_where_explain_cannot_write_is_said_before_it_computes(command, monkeypatch, pictures, run, tmp_path):
    (tmp_path / "FILE").write_text("x")
    monkeypatch.setattr("weft.explain.compare.explain_subjects", lambda *args, **options: pytest.fail("it computes"))
    for place in (tmp_path / "FILE" / "out", "/proc/nowhere/out"):
        refused(command("explain", run, pictures, "--out", place), str(Path(place).parent))


def test_a_folder_where_a_run_failed_early_is_free(command, pictures, run, tmp_path):
    """The next try may have the same --out; a folder with anything else in it is refused."""
    out, weights = tmp_path / "out", tmp_path / "weights.safetensors"
    weights.write_text("none")
    fails = options(init=weights)
    refused(command("train", pictures, *fails, "--out", out), "not a checkpoint")
    assert not out.exists()
    (out / "state").mkdir(parents=True)  # as a kill leaves it
    (out / "state" / "lock").write_text("")
    (out / "notes.txt").write_text("mine")
    refused(command("train", pictures, *options(epochs=1), "--out", out), "not an empty folder")
    (out / "notes.txt").unlink()
    refused(command("train", pictures, *fails, "--out", out), "not a checkpoint")
    assert list(out.iterdir()) == []  # a folder that was there stays
    assert command("train", pictures, *options(epochs=1), "--out", out)[0] == 0
    refused(command("train", pictures, *options(epochs=1), "--out", out), "--resume")


RESUME_ON_CPU = "import sys, weft; weft.train(resume=sys.argv[1], quiet=True)"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a GPU to begin with")
def test_a_run_of_a_gpu_goes_on_without_one(monkeypatch, pictures, tmp_path):
    settings = dict(device="auto", run__precision="fp32", model__drop_path=0.0, epochs=4)  # drop path differs
    tiny_run(pictures, tmp_path / "whole", **settings)
    update, calls = Trainer.update, iter(range(100))

    def stopped_in_the_middle(trainer):
        trainer.stop_requested = next(calls) == 6
        return update(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update", stopped_in_the_middle)
        assert tiny_run(pictures, tmp_path / "run", **settings).stopped
    program = [sys.executable, "-c", RESUME_ON_CPU, str(tmp_path / "run")]
    subprocess.run(program, check=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    losses = [
        [row["train_loss"] for row in read_rows(tmp_path / name / "metrics.jsonl") if row["kind"] == "epoch"]
        for name in ("whole", "run")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="has no /dev/shm")
def test_small_shared_memory_is_told_by_the_command(monkeypatch, command, pictures, tmp_path):
    usual = os.statvfs("/dev/shm")
    tiny = os.statvfs_result((4096, 4096, 1, 1, 1, *tuple(usual)[5:]))
    monkeypatch.setattr(loader.os, "statvfs", lambda _: tiny)
    answer = command("train", pictures, *options(data__workers=2, data__keep="no"), "--out", tmp_path / "out")
    refused(answer, "/dev/shm has 0 MiB free", "--shm-size", "data.workers")


# Odd and bad pictures ----------------------------------------------------------------------------------------------


def photo(mode: str = "RGB") -> Image.Image:
    picture = Image.fromarray(RNG.integers(0, 255, (20, 24, 3), dtype=np.uint8))
    if mode in ("I;16", "I", "F"):
        grey = np.asarray(picture.convert("L"))
        return Image.fromarray(
            {"I;16": np.uint16(grey) * 257, "I": np.int32(grey) * 257, "F": grey / np.float32(255)}[mode]
        )
    return picture.convert(mode)


def make_odd(folder: Path) -> set[str]:
    """Pictures of every kind among ordinary ones; returns the names of all that can be read."""
    make_pictures(folder, each=20, side=20, seed=1)
    place = folder / "class 1"

    def add(name: str, picture: Image.Image, format: str | None = None, **settings: Any) -> None:
        picture.save(place / name, format, **settings)

    for mode, ending in {"L": "png", "LA": "png", "P": "png", "RGBA": "png", "1": "png", "I;16": "png"}.items():
        add(f"{mode}.{ending}".replace(";", "-"), photo(mode))
    for mode in ("I", "F", "I;16", "YCbCr", "LAB", "CMYK"):
        add(f"{mode}.tiff".replace(";", "-"), photo(mode))
    add("cmyk.jpg", photo("CMYK"))
    add("palette.gif", photo("P"), transparency=3)
    for turn in range(1, 9):
        exif = Image.Exif()
        exif[0x112] = turn
        add(f"turned {turn}.jpg", photo(), exif=exif)
    for format in ("GIF", "WEBP", "PNG", "TIFF", "MPO"):
        ending = {"MPO": "jpg"}.get(format, format.lower())
        add(f"animated {format}.{ending}", photo(), format, save_all=True, append_images=[photo(), photo()])
    add("jpeg in truth.png", photo(), "JPEG")
    add("profile.jpg", photo(), icc_profile=b"nonsense" * 40)
    for name in (
        "line\nfeed",
        "caf\u00e9",
        "cafe\u0301",
        "\u732b",
        "x" * 251,
        "%s{0} $(ls) 'q'",
        os.fsdecode(b"\xff\xfe"),
    ):
        add(f"{name}.PNG", photo(), "PNG")
    found = {p.relative_to(folder).as_posix() for p in folder.rglob("*.*")}
    add(".hidden.png", photo())
    (place / "Thumbs.db").write_bytes(b"x")
    (place / ".checkpoints").mkdir()
    add(".checkpoints/1.png", photo())
    (place / "round").symlink_to(folder)
    (place / "nowhere.png").symlink_to(folder / "nowhere")
    return found


def make_bad(folder: Path) -> set[str]:
    """Files that cannot be read; returns their names."""
    for i, (name, settings) in enumerate({"cut.jpg": {}, "progressive.jpg": {"progressive": True}}.items()):
        path = folder / f"class {i}" / name
        photo().resize((200, 200)).save(path, quality=95, **settings)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    (folder / "class 2" / "empty.jpg").write_bytes(b"")
    (folder / "class 2" / "text.jpg").write_text("<b>no picture</b>\n")
    zero, huge = ((folder / "class 2" / name) for name in ("zero.bmp", "huge.bmp"))
    for path, side in ((zero, 0), (huge, 30_000)):
        photo().save(path)
        content = bytearray(path.read_bytes())
        content[18:26] = struct.pack("<ii", side, side)
        path.write_bytes(content)
    return {
        "class 0/cut.jpg",
        "class 1/progressive.jpg",
        *(f"class 2/{n}" for n in ("empty.jpg", "text.jpg", "zero.bmp", "huge.bmp")),
    }


def everything(folder: Path) -> dict[str, tuple]:
    """Names, times and contents; a folder's time changes, too, when a file was there for a moment only."""
    return {
        os.fsencode(path).hex(): (
            path.lstat().st_mtime_ns,
            path.is_file() and hashlib.sha1(path.read_bytes()).hexdigest(),
        )
        for path in [folder, *folder.rglob("*")]
    }


@pytest.fixture(scope="module")
def odd(tmp_path_factory) -> tuple[Path, Path, set[str], set[str], bool]:
    """Trained on everything odd: data, run, good names, bad names, and whether the data is as it was."""
    folder = tmp_path_factory.mktemp("odd")
    good, bad = make_odd(folder / "data"), make_bad(folder / "data")
    before = everything(folder / "data")
    for path in (folder / "data").rglob("*"):
        if path.exists():
            path.chmod(0o555 if path.is_dir() else 0o444)
    run = tiny_run(folder / "data", folder / "run", data__bad_files=0.2, run__patience=0).folder
    return folder / "data", run, good, bad, everything(folder / "data") == before


def shown(name: str) -> str:
    """As a name is stored: bytes that are no text are written as such."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def test_odd_pictures_are_all_used(odd):
    _, run, _, bad, _ = odd
    split = json.loads((run / "split.json").read_text())
    report = json.loads((run / "data_report.json").read_text())
    unread = {*report["bad"], *read_header(run)["progress"].bad}
    assert not unread - bad, "pictures that can be read were left out"
    [*_, last] = [row for row in read_rows(run / "metrics.jsonl") if row["kind"] == "epoch"]
    assert last["train_loss"] < 2
    text = json.dumps(split, ensure_ascii=False)
    assert "nowhere.png" not in text
    assert ".hidden" not in text
    kinds = {problem["kind"] for problem in report["problems"]}
    assert {"animated", "rotated", "profile", "cmyk", "alpha", "deep", "wrong-ending"} <= kinds


def test_bad_pictures_are_left_out_and_listed(odd):
    """With a reason, before training or when they come up, for reader and program."""
    _, run, _, bad, _ = odd
    listed = json.loads((run / "data_report.json").read_text())["bad"] | read_header(run)["progress"].bad
    assert listed.keys() == bad
    assert all(5 < len(why) < 200 and "\n" not in why for why in listed.values())
    page = (run / "report.html").read_text(encoding="utf-8")
    assert all(name in page for name in bad)


def test_predictions_of_odd_pictures(odd, command):
    data, run, good, bad, _ = odd
    code, out, err = command("predict", run, data, "--json", "-", "--top", "1", "--device", "cpu")
    assert code == 1, err
    found = json.loads(out)
    assert {shown(f"{data}/{name}") for name in good} <= {each["name"] for each in found if not each["error"]}
    assert {f"{data}/{name}" for name in bad} == {each["name"] for each in found if each["error"]} - {
        f"{data}/class 1/nowhere.png"
    }
    code, out, err = command("eval", run, "--json", "--device", "cpu")
    assert code == 0, err
    assert json.loads(out)["top1"] == json.loads((run / "evaluation.json").read_text())["top1"]


def test_the_data_is_as_it_was(odd):
    assert odd[-1]


def test_too_many_bad_pictures_stop(command, odd, tmp_path):
    answer = command("train", odd[0], *options(epochs=1), "--out", tmp_path / "out")
    refused(answer, "cannot be read", "data.bad_files", "weft check")


def damage_pixels(path: Path) -> None:
    """Header, end and length stay right, so that only decoding shows it."""
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 50] = bytes(50)
    path.write_bytes(content)


@pytest.mark.parametrize("side", ["train", "val"])
def test_pictures_that_turn_out_bad_are_listed_or_stop(command, tmp_path, side):
    data = split_pictures(tmp_path / "data")
    for path in (data / side / "class 0").iterdir():
        damage_pixels(path)
    settings = options(epochs=1, batch=6)  # which divides 18: every picture comes up
    refused(command("train", data, *settings, "--out", tmp_path / "a"), "of 36 pictures cannot be read, more than 1%")
    code, out, err = command("train", data, *settings, "--data.bad_files", "0.5", "--out", tmp_path / "b")
    assert code == 0, err
    bad = {f"{side}/class 0/{i}.png" for i in range(6)}
    assert read_header(tmp_path / "b")["progress"].bad.keys() == bad
    page = (tmp_path / "b" / "report.html").read_text(encoding="utf-8")
    assert all(name in out and name in page for name in bad)


def test_validation_without_a_readable_picture(command, tmp_path):
    """Found out after the first epoch: training goes on, and the end is one line."""
    data = split_pictures(tmp_path / "data")
    for path in (data / "val").rglob("*.png"):
        damage_pixels(path)
    settings = options(epochs=2, data__bad_files=1.0)
    refused(command("train", data, *settings, "--out", tmp_path / "run"), "none of the 18 pictures", "can be read")


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_frames_count_as_pixels(run, tmp_path, format):
    predictor = weft.load(run, device="cpu")
    predictor.preprocessing = replace(predictor.preprocessing, max_pixels=1_000)
    file = tmp_path / f"a.{format.lower()}"
    for frames, is_good in ((1, True), (3, False)):
        photo().save(file, format, save_all=True, append_images=[photo() for _ in range(frames - 1)])
        [prediction] = predictor.predict(file)
        assert is_good == (not prediction.error)
        assert is_good or "24 x 20 x 3 frames pixels are more than data.max_pixels=1000" in prediction.error


@pytest.mark.parametrize("size", [(1, 100_000), (100_000, 1)])
def test_threads_of_pixels_do_not_grow(run, tmp_path, size):
    """A few bytes whose short side, were it as long as the model's, would make the picture fill the memory."""
    Image.new("RGB", size).save(tmp_path / "thin.png")
    photo().save(tmp_path / "good.png")
    predictor = weft.load(run, device="cpu")
    predictor.preprocessing = replace(predictor.preprocessing, size=(64, 64))
    good, thin = predictor.predict([tmp_path / "good.png", tmp_path / "thin.png"])
    assert good.error == ""
    assert f"{size[0]} x {size[1]} pixels are too thin" in thin.error


FITS = b"".join(
    f"{card:80}".encode()
    for card in (
        "SIMPLE  =                    T",
        "BITPIX  =                    8",
        "NAXIS   =                    2",
        "NAXIS1  =                    4",
        "NAXIS2  =                    4",
        "END",
    )
).ljust(2880) + bytes(2880)
PSD = b"8BPS" + struct.pack(">H6xHIIHH", 1, 3, 4, 4, 8, 3) + bytes(12) + bytes(2 + 48)


@pytest.mark.parametrize("format", ["EPS", "PDF", "ICO", "TGA", "PCX", "SGI", "DDS", "JPEG2000", "PSD", "FITS"])
def test_other_formats_are_refused(run, tmp_path, format):
    """Whatever the file is called: the decoder is not even asked."""
    file = tmp_path / "picture.png"
    if format in ("PSD", "FITS"):
        file.write_bytes({"PSD": PSD, "FITS": FITS}[format])
    else:
        photo().save(file, format)
    if format != "PDF":  # which Pillow writes only
        with Image.open(file) as opened:
            assert opened.format == format, "not what it should be"
    [prediction] = weft.load(run, device="cpu").predict(file)
    assert "not a picture in one of the formats" in prediction.error


# Labels, splits, very few pictures ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("classes", "each", "settings"),
    [
        (3, 1, {}),  # nothing to validate on
        (2, 2, {}),
        (2, 2, dict(batch=64)),
        (2, 3, dict(batch=5, run__micro_batch=2, img_size=32)),  # parts of 2, 2 and 1
        (3, 4, dict(fraction=0.0001)),
        (3, 12, dict(epochs=1_000_000, minutes=0.002)),
        (3, 4, dict(batch=1, img_size=64)),
    ],
)
def test_very_few_pictures_train(command, tmp_path, classes, each, settings):
    data = make_pictures(tmp_path / "data", classes, each)
    code, _, err = command("train", data, *options(**{"epochs": 1, **settings}), "--out", tmp_path / "run")
    assert code == 0, err
    assert err == ""
    code, out, _ = command("predict", tmp_path / "run", data, "--device", "cpu")
    assert code == 0
    assert len(out.splitlines()) >= classes * each


def test_one_picture_in_total_is_too_few(command, tmp_path):
    data = make_pictures(tmp_path / "data", 1, 1)
    refused(command("train", data, *options(), "--out", tmp_path / "run"), "only one class")


def split_pictures(folder: Path) -> Path:
    for seed, part in enumerate(("train", "val")):
        make_pictures(folder / part, each=6, seed=seed)
    return folder


def test_leaks_stop_unless_allowed(command, tmp_path):
    data = split_pictures(tmp_path / "data")
    shutil.copy(data / "train/class 0/0.png", data / "val/class 0/copy.png")
    refused(command("train", data, *options(epochs=1), "--out", tmp_path / "a"), "1 picture", "more than one side")
    code, out, err = command("train", data, *options(epochs=1, data__leaks="warn"), "--out", tmp_path / "b")
    assert code == 0, err
    assert "warning: 1 picture on more than one side" in out
    assert "val/class 0/copy.png" in out


def test_class_of_validation_alone_is_noted(command, tmp_path):
    data = split_pictures(tmp_path / "data")
    shutil.rmtree(data / "train/class 2")
    code, out, err = command("train", data, *options(epochs=1), "--out", tmp_path / "run")
    assert code == 0, err
    assert "'class 2'" in out
    per_class = json.loads((tmp_path / "run" / "evaluation.json").read_text())["per_class"]
    assert {row["name"]: row["n"] for row in per_class} == {"class 0": 6, "class 1": 6, "class 2": 0}  # not measured


def test_nothing_readable_at_all(command, tmp_path):
    data = make_pictures(tmp_path / "data", each=3)
    for path in data.rglob("*.png"):
        path.write_bytes(b"")
    refused(command("train", data, *options(data__bad_files=1.0), "--out", tmp_path / "run"))


def table(folder: Path, header: str, row: str) -> Path:
    names = [p.as_posix() for p in sorted(folder.rglob("*.png"))]
    lines = [header, *(row.format(name=name, label=Path(name).parent.name) for name in names)]
    (folder / "labels.csv").write_text("\n".join(lines))
    return folder / "labels.csv"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["DATA", "--img-size", 200_000], ["does not fit into memory", "--img-size"]),
        (["DATA", "--img-size", -1], ["augment.img_size"]),
        (["DATA", "--img-size", 1], ["augment.img_size=1"]),  # at which torch crashes
        (["DATA", "--batch", 1], ["BatchNorm", "--batch"]),
        (["DATA", "--batch", "many"], ["run.batch", "whole number"]),
        (["DATA", "--seed", 2**70], ["run.seed"]),
        (["DATA", "--fraction", 0], ["data.fraction"]),
        (["DATA", "--epochs", 0], ["run.epochs"]),
        (["DATA", "--run.threads", 100_000], ["run.threads", "at most 1024"]),  # at which OpenMP crashes
        (["DATA", "--data.workers", 100_000], ["data.workers", "at most 1024"]),
        (["DATA", "--out", "LOOP"], ["LOOP", "leads to itself"]),
        (["DATA", "--lr", "nan"], ["optim.lr"]),
        (["DATA", "DATA"], ["DATA"]),
        (["DATA", "--out", "DATA/run"], ["lies inside the data"]),
        (["DATA", "--val", "VAL", "--out", "VAL/run"], ["lies inside the data"]),
        (["DATA", "--out", "DATA"], ["lies inside the data"]),
        (["DATA", "--out", "FILE"], ["FILE", "already exists"]),
        (["DATA", "--out", "FILE/run"], ["FILE/run"]),
        (["DATA", "--out", "/proc/nowhere/run"], ["/proc/nowhere"]),
        (["DATA", "--resume", "RUN", "--out", "OUT"], ["--resume", "--out"]),
        (["--resume", "FILE"], ["FILE has no state"]),
        (["--resume", "DATA"], ["has no state"]),
        (["FILE"], ["is not data"]),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else None,
)
def test_what_cannot_work_gets_one_line(command, run, tmp_path, args, words):
    (tmp_path / "FILE").write_text("x")
    (tmp_path / "LOOP").symlink_to("LOOP")
    data = make_pictures(tmp_path / "DATA")
    make_pictures(tmp_path / "VAL", seed=1)
    before = everything(data)
    places = dict(RUN=str(run))
    places |= {name: str(tmp_path / name) for name in ("DATA", "VAL", "FILE", "LOOP", "OUT")}
    given = [re.sub("|".join(places), lambda found: places[found[0]], str(arg)) for arg in args]
    if "--resume" not in args:
        mine = {str(arg)[2:].replace("-", "_"): None for arg in args if str(arg).startswith("--")}
        given += options(**{"epochs": 1, **mine}) if "--epochs" not in args else options(**mine)
    if "--out" not in args and "--resume" not in args:
        given += ["--out", places["OUT"]]
    refused(command("train", *given), *(places.get(word, word) for word in words))
    assert everything(data) == before


@pytest.mark.parametrize(
    ("header", "row", "words"),
    [
        ("path,size", "{name},7", ["none called label"]),
        ("path,label,label", "{name},{label},{label}", ["two columns called 'label'"]),
        ("path,Label,label ", "{name},{label},{label}", ["two columns called 'Label'"]),
        ("path,label", "", ["has no rows"]),
        ("path,label", '"{name},{label}', ['a quote (") in line', "never closed"]),
    ],
)
def test_wrong_tables_get_one_line(command, tmp_path, header, row, words):
    file = table(make_pictures(tmp_path / "data", each=3), header, row)
    refused(command("train", file, *options(epochs=1), "--out", tmp_path / "run"), "labels.csv", *words)


def test_files_among_class_folders_are_no_classes(command, tmp_path):
    data = make_pictures(tmp_path / "data")
    shutil.rmtree(data / "class 2")
    (data / "class 2").write_text("a file")
    assert command("train", data, *options(epochs=1), "--out", tmp_path / "run")[0] == 0
    assert read_header(tmp_path / "run")["classes"] == ["class 0", "class 1"]


@pytest.mark.parametrize(
    "args",
    [
        ["predict", "FILE", "x.png"],
        ["eval", "FILE"],
        ["predict", "RUN", "DATA", "--csv", "FILE/x"],
        ["predict", "RUN", "DATA", "--json", "DATA"],
        ["check", "DATA", "--out", "FILE/x"],
        ["check", "DATA", "--out", "LOOP"],
        ["predict", "RUN", "DATA", "--csv", "LOOP"],
        ["explain", "RUN", "DATA", "--out", "LOOP"],
        ["export", "RUN", "--out", "LOOP"],
    ],
    ids=" ".join,
)
def test_wrong_places_of_other_commands_get_one_line(command, pictures, run, tmp_path, args):
    (tmp_path / "FILE").write_text("x")
    (tmp_path / "LOOP").symlink_to("LOOP")
    places = {"FILE": str(tmp_path / "FILE"), "LOOP": str(tmp_path / "LOOP"), "RUN": str(run), "DATA": str(pictures)}
    answer = command(*(re.sub("|".join(places), lambda found: places[found[0]], arg) for arg in args))
    refused(answer)
    assert answer[1] == ""


def test_a_finished_run_has_nothing_left_to_do(command, broken):
    before = load_file(broken / "model.safetensors")
    code, out, err = command("train", "--resume", broken)
    assert code == 0, err
    assert "3 of 3" in out
    after = load_file(broken / "model.safetensors")
    assert all(torch.equal(before[key], after[key]) for key in before)


# Weights that are no numbers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(command, pictures, broken, tmp_path, value):
    weights = load_file(broken / "model.safetensors")
    weights["head.weight"][0, 0] = value
    save_file(weights, broken / "model.safetensors")
    torch.save(weights, tmp_path / "weights.pt")
    words = "no numbers (NaN or infinite) in 1 tensor", "such as head.weight"
    for args in (
        ["predict", broken, pictures],
        ["eval", broken],
        ["explain", broken, pictures, "--out", tmp_path / "a"],
        ["train", pictures, *options(init=broken), "--out", tmp_path / "b"],
        ["train", pictures, *options(init=tmp_path / "weights.pt"), "--out", tmp_path / "c"],
        ["train", pictures, *options(teacher=broken), "--out", tmp_path / "d"],
        ["convert", tmp_path / "weights.pt", "--model", "cvt_nano", "--out", tmp_path / "e"],
    ):
        refused(command(*args), *words)


def test_answers_that_are_no_numbers_are_said_and_json_stays_json(command, pictures, broken):
    weights = load_file(broken / "model.safetensors")
    weights["head.weight"].fill_(3e38)
    save_file(weights, broken / "model.safetensors")
    code, out, _ = command("predict", broken, pictures, "--json", "-", "--device", "cpu")
    rows = json.loads(out, parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))
    assert code == 1
    assert {row["error"] for row in rows} == {"the model's answer is no number"}


# Exit codes --------------------------------------------------------------------------------------------------------


def signal_at_the_first_step(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    original = Trainer.update

    def interrupted(self):
        if not self.stop_requested:
            signal.raise_signal(number)
        return original(self)

    monkeypatch.setattr(Trainer, "update", interrupted)


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
@pytest.mark.parametrize("what", ["train", "search"])
def test_exit_code_after_a_signal(command, monkeypatch, pictures, tmp_path, what, number, expected):
    """As shells expect of Ctrl-C; a scheduler asked for it, and gets what it asked for."""
    signal_at_the_first_step(monkeypatch, number)
    more = [] if what == "train" else ["--trials", 2, "--keep", 1]
    code, out, err = command(
        what, pictures, *options(epochs=1, minutes=None, batch=None, run__batch=8), *more, "--out", tmp_path / "out"
    )
    assert code == expected, err
    assert ("weft train --resume" if what == "train" else "the same command") in out


def test_the_command_that_is_recommended_works(command, monkeypatch, pictures, tmp_path):
    """Wherever the run lies: the words that a shell would make of that line go on with it."""
    run = tmp_path / "it's my $HOME; run"
    with monkeypatch.context() as patch:
        signal_at_the_first_step(patch, signal.SIGINT)
        _, out, _ = command("train", pictures, *options(epochs=1), "--out", run)
    refused(command("train", pictures, *options(), "--out", run), f"weft train --resume {shlex.quote(str(run))};")
    (line,) = (line for line in out.splitlines() if "go on with: " in line)
    code, out, err = command(*shlex.split(line.partition("go on with: ")[2])[1:])
    assert code == 0, err
    assert (run / "report.html").exists()


@pytest.mark.parametrize(
    ("function", "args"),
    [
        ("weft.data.check.check.check", ["check", "DATA"]),
        ("weft.run.evaluate.evaluate", ["eval", "RUN"]),
        ("weft.run.predictor.Predictor.stream", ["predict", "RUN", "DATA"]),
        ("weft.explain.compare.explain_subjects", ["explain", "RUN", "DATA", "--out", "OUT"]),
        ("weft.study.speed.measure.measure", ["bench", "cvt_nano", "--device", "cpu"]),
        (
            "weft.study.efficiency.compare.run_cells",
            ["bench", "cvt_nano", "ceit_nano", "--compare", "DATA", "--out", "OUT"],
        ),
        ("weft.study.ablate.run.run_cells", ["ablate", "cvt-position", "DATA", "--epochs", "1", "--out", "OUT"]),
        ("weft.run.start.open_data", ["train", "DATA", "--out", "OUT"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_exit_code_of_whatever_was_interrupted(command, monkeypatch, run, pictures, tmp_path, function, args):
    def interrupted(*args, **kwargs):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(function, interrupted)
    places = {"DATA": pictures, "RUN": run, "OUT": tmp_path / "out"}
    code, _, err = command(*(places.get(arg, arg) for arg in args))
    assert (code, err.splitlines()[-1]) == (130, "weft: interrupted; everything saved so far is intact.")


# Long names --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["check", "LONG"], 2),
        (["check", "TABLE"], 2),
        (["predict", "RUN", "LONG"], 1),
        (["predict", "RUN", "TABLE"], 1),
        (["predict", "LONG", "DATA"], 2),
        (["train", "DATA", "--out", "LONG"], 2),
        (["train", "DATA", "--config", "LONG"], 2),
        (["train", "DATA", "--recipe", "LONG"], 2),
        (["train", "DATA", "--init", "LONG"], 2),
        (["train", "--resume", "LONG"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_very_long_names_get_one_short_line(command, pictures, run, tmp_path, args, code):
    (tmp_path / "table.csv").write_text(f"path,label\n{'x' * 200_000},a\n{next(pictures.rglob('*.png'))},b\n")
    places = {"LONG": "x" * 300, "TABLE": tmp_path / "table.csv", "DATA": pictures, "RUN": run}
    found, _, err = command(*(places.get(word, word) for word in args))
    assert found == code, err
    assert len(err.splitlines()) == (code == 2)
    assert len(err) < 1000


# Files of others ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "args"),
    [
        ("model.safetensors", ["predict", "RUN", "DATA"]),
        ("model.safetensors", ["train", "DATA", "--init", "RUN", "--out", "OUT"]),
        ("config.yaml", ["predict", "RUN", "DATA"]),
        ("instances.json", ["check", "BOXES"]),  # which would be read as pictures without boxes
        ("1.png", ["predict", "RUN", "DATA/class 0/1.png"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_files_that_may_not_be_read_are_said_to_be(command, monkeypatch, pictures, run, tmp_path, file, args):
    """Not to be damaged, nor missing."""
    boxes = make_squares(tmp_path / "boxes", "coco", count=3)
    (found,) = (boxes / "annotations").iterdir()
    found.rename(found.with_name("instances.json"))
    open_as_usual, may_as_usual = io.open, os.access

    def opened(path, *args, **settings):
        if str(path).endswith(file):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return open_as_usual(path, *args, **settings)

    monkeypatch.setattr("io.open", opened)  # what Path.open calls
    monkeypatch.setattr("builtins.open", opened)
    monkeypatch.setattr("os.access", lambda path, mode: not str(path).endswith(file) and may_as_usual(path, mode))
    places = {"DATA": pictures, "RUN": run, "BOXES": boxes, "OUT": tmp_path / "out"}
    given = [re.sub("|".join(places), lambda match: str(places[match[0]]), word) for word in args]
    code, out, err = command(*given, *options()[: 2 * (args[0] == "train")])
    assert code == (1 if file == "1.png" else 2), (out, err)
    assert "Permission denied" in out + err
    assert "Errno" not in out + err


# Files that are none -------------------------------------------------------------------------------------------------


@pytest.fixture
def waiting():
    """Ends a test that waits for a pipe."""
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(300)
    yield
    signal.alarm(0)


@pytest.mark.usefixtures("waiting")
@pytest.mark.parametrize("kind", ["folder", "table", "coco", "masks", "yolo", "voc"])
def test_pipes_devices_and_sockets_are_not_waited_for(command, run, tmp_path, kind):
    """Wherever a file could be: as a picture, a mask, a table of boxes, a list of names."""
    data = make_pictures(tmp_path / "data") if kind in ("folder", "table") else make_squares(tmp_path / "data", kind)
    for folder in {path.parent for path in data.rglob("*") if path.is_file()} | {data}:
        for name in ("pipe.png", "pipe.txt", "pipe.xml", "pipe.json", "pipe.yaml", "classes.txt", "train.txt"):
            if not (folder / name).exists():
                os.mkfifo(folder / name)
        (folder / "zero.png").symlink_to("/dev/zero")
        with contextlib.chdir(folder):  # a socket's path may have 108 bytes
            socket.socket(socket.AF_UNIX).bind("socket.png")
    given = table(data, "path,label", "{name},{label}") if kind == "table" else data
    code, out, err = command("check", given, "--json")
    if kind == "table":
        return refused((code, out, err), "12 of 48 files do not exist")
    assert code == 0, (out, err)
    assert json.loads(out)["pictures"] == (36 if kind == "folder" else 12)
    if kind == "folder":
        assert any("Left out pipes, sockets and devices" in note for note in json.loads(out)["notes"])
        code, out, err = command("predict", run, data, data / "pipe.png", "/dev/zero", "--json", "-", "--device", "cpu")
        assert code == 1, err
        odd = {Path(row["name"]).name: row["error"] for row in json.loads(out) if row["error"]}
        assert odd.keys() == {"pipe.png", "zero.png", "socket.png", "zero"}
        assert all("not a file" in why for why in odd.values())


@pytest.mark.usefixtures("waiting")
@pytest.mark.parametrize(
    "args",
    [
        ["check", "PIPE.csv"],
        ["check", "PIPE.json"],
        ["train", "PIPE.tar", "--out", "OUT"],
        ["train", "DATA", "--val", "PIPE.csv", "--out", "OUT"],
        ["train", "DATA", "--config", "PIPE.yaml", "--out", "OUT"],
        ["train", "DATA", "--init", "PIPE.pt", "--out", "OUT"],
        ["convert", "PIPE.pt", "--model", "cvt_nano", "--out", "OUT"],
        ["predict", "RUN", "DATA", "model.safetensors"],
        ["predict", "RUN", "DATA", "config.json"],
        ["eval", "RUN", "split.json"],
        ["train", "--resume", "RUN", "metrics.jsonl"],
        ["train", "--resume", "RUN", "config.yaml"],
        ["train", "--resume", "RUN", "state/last.safetensors"],
    ],
    ids=" ".join,
)
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(command, pictures, broken, tmp_path, args):
    """Given as data, as settings or as weights, or part of a run."""
    *words, last = args
    if "RUN" in words and last != "DATA":
        (broken / last).unlink()
        os.mkfifo(broken / last)
    else:
        words = args
    places = {name: str(tmp_path / name) for name in ("PIPE", "OUT")} | {"DATA": str(pictures), "RUN": str(broken)}
    given = [re.sub("|".join(places), lambda found: places[found[0]], word) for word in words]
    for word in given:
        if word.startswith(places["PIPE"]):
            os.mkfifo(word)
    refused(command(*given))


def test_links_that_lead_round_are_left_out_and_listed(command, pictures, run, tmp_path):
    data = Path(shutil.copytree(pictures, tmp_path / "data"))
    (data / "self").symlink_to("self")
    (data / "up").symlink_to("..")
    (data / "here").symlink_to(data)
    (data / "class 0" / "self.png").symlink_to("self.png")
    code, out, _ = command("check", data, "--json", "--quick")
    report = json.loads(out)
    assert (code, report["pictures"], report["classes"]) == (0, 36, ["class 0", "class 1", "class 2"])
    (row,) = json.loads(command("predict", run, data / "class 0" / "self.png", "--json", "-", "--device", "cpu")[1])
    assert row["error"] == "Too many levels of symbolic links"
    notes = " ".join(report["notes"])
    assert "2 broken links: 'self', 'class 0/self.png'" in notes
    assert re.search("link back to one above them: '(up|here)', '(up|here)'", notes)


# Documents ----------------------------------------------------------------------------------------------------------

DEEP = {".yaml": "{a: " * 3000, ".json": '{"a": ' * 3000 + "1" + "}" * 3000}
LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
DOCUMENTS = {
    "config": ["train", "DATA", "--config", "FILE.yaml", "--out", "OUT"],
    "recipe": ["train", "DATA", "--recipe", "FILE.yaml", "--out", "OUT"],
    "table": ["ablate", "FILE.yaml", "DATA", "--out", "OUT"],
    "space": ["search", "DATA", "--model", "cvt_nano", "--space", "FILE.yaml", "--out", "OUT"],
    "setting": ["train", "DATA", "--model.args.embed_dims", DEEP[".yaml"], "--out", "OUT"],
    "classes": ["check", "MASKS", "--data.classes", "FILE.json"],
    "config.yaml": ["train", "--resume", "RUN"],
    "config.json": ["predict", "RUN", "DATA"],
    "init": ["train", "DATA", "--init", "RUN", "--out", "OUT"],
    "split.json": ["eval", "RUN"],
    "data_report.json": ["train", "--resume", "RUN"],
}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documents_nested_deeply_get_one_line(command, pictures, broken, tmp_path, document):
    for ending, text in DEEP.items():
        (tmp_path / f"FILE{ending}").write_text(text)
    file = {"init": "config.json"}.get(document, document)
    if "." in file:
        (broken / file).write_text(DEEP[Path(file).suffix])
    places = {name: str(tmp_path / name) for name in ("FILE", "OUT", "MASKS")} | {"DATA": pictures, "RUN": broken}
    if "MASKS" in DOCUMENTS[document]:
        make_squares(tmp_path / "MASKS", count=3)
    given = [re.sub("|".join(places), lambda found: str(places[found[0]]), word) for word in DOCUMENTS[document]]
    answer = command(*given)
    refused(answer, "damaged" if document == "config.json" else "not a split" if document == "split.json" else "nested")
    assert len(answer[2]) < 400


CRAFTED = {
    "split.json": [{}, [], 7, {"val": ["1.png"]}, {"val": 5}, {"folders": 5}, {"rest": "nowhere"}, {"rest": ["val"]}],
    "data_report.json": [{}, [], 7, {"problems": 7}, {"problems": [{"kind": 7}]}, {"unheard": "of"}],
    "config.json": [
        *({"size": size} for size in ([10**6] * 2, [-5, "a"], [0, 0], 7)),
        *({"mean": mean} for mean in ("x", ["a"] * 3, [], [float("nan")] * 3)),
        {"std": [0, 0, 0]},
        {"crop_pct": 0},
        {"channels": -1},
        {"depth": 7},
        {"interpolation": "guess"},
        {"interpolation": None},
        {"crop_mode": "round"},
        {"max_pixels": 0},
    ],
}


@pytest.mark.parametrize(
    ("file", "change"), [(file, change) for file, changes in CRAFTED.items() for change in changes], ids=str
)
def test_documents_that_were_changed_get_one_line(command, pictures, broken, file, change):
    """What no run of Weft's has: part of the file is replaced, or all of it where `change` is empty or no mapping."""
    content = json.loads((broken / file).read_text())
    if file == "config.json":
        content["weft"]["preprocessing"] |= change
    else:
        content = {**content, **change} if isinstance(change, dict) and change else change
    (broken / file).write_text(json.dumps(content))
    refused(command(*(["predict", broken, pictures] if file == "config.json" else ["train", "--resume", broken])))


def test_documents_that_grow_get_one_line(command, pictures, tmp_path):
    (tmp_path / "laughs.yaml").write_text(f"{LAUGHS}optim:\n  lr: *a11\n")
    answer = command("train", pictures, "--config", tmp_path / "laughs.yaml", "--out", tmp_path / "out")
    refused(answer, "more than 1,000,000 values")


# Names ------------------------------------------------------------------------------------------------------------

ESCAPES = "\x1b]0;owned\x07\x1b[2J\u202e\r"  # sets the title, clears the screen, turns the writing round
NASTY = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@pytest.fixture(scope="module")
def nasty(tmp_path_factory) -> tuple[Path, Path]:
    """Pictures, classes and a model whose names are escape sequences; data and run."""
    folder = tmp_path_factory.mktemp("nasty")
    data = make_pictures(folder / f"{ESCAPES}data", each=6)
    for number, place in enumerate(sorted(data.iterdir())):
        place.rename(data / f"{ESCAPES}{number}")
    (data / f"{ESCAPES}0" / "0.png").rename(data / f"{ESCAPES}0" / f"{ESCAPES}.png")
    (data / f"{ESCAPES}0" / f"{ESCAPES}bad.png").write_text("x")
    return data, tiny_run(data, folder / f"{ESCAPES}run", epochs=1, data__bad_files=0.5).folder


@pytest.mark.parametrize(
    "args",
    [
        ["train", "DATA", *options(epochs=1, data__bad_files=0.5), "--out", "OUT"],
        ["train", "--resume", "RUN"],
        ["check", "DATA"],
        ["check", "DATA/nothing"],
        ["eval", "RUN"],
        ["eval", "RUN", "DATA", "--split", "all"],
        ["predict", "RUN", "DATA"],
        ["predict", "RUN", "DATA", "--json", "-"],
        ["predict", "RUN", "DATA/nothing"],
        ["explain", "RUN", "DATA", "--out", "OUT"],
        ["recipes", "RUN/recipe.yaml"],
        ["eval", "DATA"],
    ],
    ids=" ".join,
)
def test_escape_sequences_never_reach_the_terminal(command, nasty, tmp_path, args):
    data, run = nasty
    (run / "recipe.yaml").write_text(f"# {ESCAPES}\n", encoding="utf-8")
    places = {"DATA": str(data), "RUN": str(run), "OUT": str(tmp_path / f"{ESCAPES}out")}
    with warnings.catch_warnings(record=True) as told:  # these go to the terminal, too
        _, out, err = command(*(re.sub("|".join(places), lambda found: places[found[0]], str(arg)) for arg in args))
    assert not any(NASTY.search(str(warning.message)) for warning in told)
    assert "owned" in out + err  # it is shown, as letters
    assert not NASTY.search(out + err), (out, err)


# The table above ----------------------------------------------------------------------------------------------------

LINES = [
    *(f"{letter}{n}" for letter, most in zip("CRNID", (9, 5, 4, 8, 5), strict=True) for n in range(1, most + 1)),
    *(f"O{n}" for n in range(1, 15)),
]


def test_every_line_of_the_checklist_has_tests_that_exist():
    table = str(__doc__).partition("exist):\n\n")[2]
    cells = re.split(r"^([A-Z]\d+) +", table, flags=re.MULTILINE)[1:]
    tests_of = (re.findall(r"\btest_\w+\.test_\w+", cell) for cell in cells[1::2])
    named = dict(zip(cells[::2], tests_of, strict=True))
    assert all(named.values())
    assert list(named) == LINES
    tests = {name for names in named.values() for name in names}
    for file in {test.split(".")[0] for test in tests}:
        (path,) = (ROOT / "tests").rglob(f"{file}.py")
        tree = ast.parse(path.read_text(encoding="utf-8"))
        tests -= {f"{file}.{node.name}" for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert not tests, "these do not exist"
