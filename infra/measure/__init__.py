"""What users measure with: `batchway bench`, `batchway compare`, `batchway cascade fit`."""
