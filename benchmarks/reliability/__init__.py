"""Kills, bit flips, full disks, two writers and NaN: attacks on what a run keeps."""
