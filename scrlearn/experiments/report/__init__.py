"""Reports: Table 1 and the figures of the paper from a result store, as a web page and as Markdown."""

from scrlearn.experiments.report.build import build, headline
from scrlearn.experiments.report.document import Document
from scrlearn.experiments.report.files import Written, read_runs, write
from scrlearn.experiments.report.notes import Note, load_notes

__all__ = ["Document", "Note", "Written", "build", "headline", "load_notes", "read_runs", "write"]
