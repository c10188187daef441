"""Datasets as resident tensors, and the batches that populations train on."""

from esper._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "esper.runtime.data.batches": (
            "Batch",
            "EvalBatches",
            "SharedBatchIterator",
            "fuse_shared",
            "test_batches",
            "validation_batches",
        ),
        "esper.runtime.data.datasets": (
            "Dataset",
            "Split",
            "dataset_names",
            "load_dataset",
            "register_dataset",
            "synthetic_dataset",
            "validation_split",
        ),
        "esper.runtime.data.formats": ("ChecksumError", "DataError", "MissingDataError"),
        "esper.runtime.data.sources": ("get_dataset",),
    },
)
