"""Datasets as resident uint8 tensors, and the batches that populations train on."""
from esper._lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, {
    "Batch": "esper.runtime.data.batches",
    "ChecksumError": "esper.runtime.data.formats",
    "DataError": "esper.runtime.data.formats",
    "Dataset": "esper.runtime.data.datasets",
    "EvalBatches": "esper.runtime.data.batches",
    "MissingDataError": "esper.runtime.data.formats",
    "SharedBatchIterator": "esper.runtime.data.batches",
    "Split": "esper.runtime.data.datasets",
    "dataset_names": "esper.runtime.data.datasets",
    "fuse_shared": "esper.runtime.data.batches",
    "get_dataset": "esper.runtime.data.sources",
    "load_dataset": "esper.runtime.data.datasets",
    "synthetic_dataset": "esper.runtime.data.datasets",
    "test_batches": "esper.runtime.data.batches",
    "validation_batches": "esper.runtime.data.batches",
    "validation_split": "esper.runtime.data.datasets",
})
