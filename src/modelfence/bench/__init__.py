"""The paper's tables, regenerated: cells that are files, claimed by processes, merged into tables and figures."""
