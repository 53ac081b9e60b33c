//! The description of the REST API as an OpenAPI 3.1 document.

use serde_json::{Map, Value, json};

/// Path, method, summary, and the name of its path parameter if it has one.
const OPERATIONS: [(&str, &str, &str, Option<&str>); 35] = [
    ("/v1/status", "get", "Health, drives, arrays, mounts", None),
    (
        "/v1/events",
        "get",
        "What happened, oldest first, at most 1000 events; ?after=SEQ for what is newer",
        None,
    ),
    ("/v1/latency", "get", "Latencies of all layers since the start", None),
    ("/v1/drives", "get", "All drives", None),
    ("/v1/drives/{id}", "get", "One drive", Some("id")),
    ("/v1/drives/{id}/fail", "post", "Takes a drive out of service", Some("id")),
    (
        "/v1/drives/{id}/replace",
        "post",
        "Puts a blank drive in its place; body {\"path\": PATH} is optional",
        Some("id"),
    ),
    ("/v1/pools", "get", "All pools", None),
    ("/v1/pools/{name}", "get", "One pool", Some("name")),
    (
        "/v1/pools/{name}",
        "post",
        "Changes its settings; body {\"rebuild_rate\": RATE}, which is auto, max, or bytes a second, as text",
        Some("name"),
    ),
    ("/v1/stacks", "get", "All stacks, with their targets", None),
    ("/v1/stacks/{number}", "get", "One stack", Some("number")),
    (
        "/v1/targets/{number}/files",
        "get",
        "Files that may have something on a target that does not serve",
        Some("number"),
    ),
    (
        "/v1/targets/{number}/forget",
        "post",
        "Gives up a target that does not serve, with its data: it never serves again, and nothing waits for it",
        Some("number"),
    ),
    ("/v1/arrays", "get", "All arrays", None),
    ("/v1/arrays/{id}", "get", "One array, by id or name", Some("id")),
    (
        "/v1/arrays/{id}/rebuild",
        "post",
        "Job that ends when nothing more can be rebuilt; `all` for every array",
        Some("id"),
    ),
    ("/v1/arrays/{id}/scrub", "post", "Job that verifies and repairs; `all` for every array", Some("id")),
    ("/v1/fs", "get", "All file systems", None),
    ("/v1/fs/{name}", "get", "One file system", Some("name")),
    (
        "/v1/fs/{name}/check",
        "post",
        "Job that checks names, links, chunks, extents and bitmaps; body {\"repair\": true} mends what is wrong",
        Some("name"),
    ),
    ("/v1/fs/{name}/map-copies", "post", "Job that copies names and maps to the data drives", Some("name")),
    (
        "/v1/fs/{name}/damaged",
        "get",
        "Files whose data cannot be read any more, with the bytes",
        Some("name"),
    ),
    (
        "/v1/fs/{name}/layout",
        "get",
        "Targets of a file, or of new files in a directory; ?path=PATH from the root",
        Some("name"),
    ),
    (
        "/v1/fs/{name}/layout",
        "post",
        "Changes it; body {\"path\": PATH, \"count\": TARGETS, \"turn\": CHUNKS}, the last two optional",
        Some("name"),
    ),
    ("/v1/mounts", "get", "Where the file system is mounted", None),
    ("/v1/mounts", "post", "Mounts it; body {\"path\": PATH}", None),
    ("/v1/mounts", "delete", "Unmounts it", None),
    ("/v1/sessions", "get", "All clients: what each has open, leased and locked, and what it owes", None),
    ("/v1/sessions/{id}", "get", "One client", Some("id")),
    (
        "/v1/sessions/{id}/end",
        "post",
        "Ends the session of a client in another process; what it has not synced is lost",
        Some("id"),
    ),
    ("/v1/jobs/{id}", "get", "A job: running, done or failed, with its result", Some("id")),
    ("/v1/down", "post", "Stops the instance", None),
    ("/v1/openapi.json", "get", "This description", None),
    ("/metrics", "get", "Metrics in Prometheus' text format", None),
];

/// Builds the document from [`OPERATIONS`].
pub(crate) fn document() -> Value {
    let mut paths: Map<String, Value> = Map::new();
    for (path, method, summary, parameter) in OPERATIONS {
        assert_eq!(path.contains('{'), parameter.is_some(), "{path}: a path names its parameter");
        let parameters: Vec<Value> = parameter
            .iter()
            .map(|name| json!({ "name": name, "in": "path", "required": true, "schema": { "type": "string" } }))
            .collect();
        let operation = json!({
            "summary": summary,
            "parameters": parameters,
            "responses": {
                "200": { "description": "done" },
                "401": { "description": "no token, or a wrong one" },
                "403": { "description": "Host or Origin does not name the listener" },
                "404": { "description": "no such thing; the body says which" },
                "409": { "description": "refused; the body says why, nothing was changed" },
            },
        });
        let entry = paths.entry(path).or_insert_with(|| json!({}));
        entry[method] = operation;
    }
    json!({
        "openapi": "3.1.0",
        "info": { "title": "Penstock", "version": env!("CARGO_PKG_VERSION"), "license": { "name": "Apache-2.0" } },
        "security": [{ "token": [] }],
        "components": { "securitySchemes": { "token": { "type": "http", "scheme": "bearer" } } },
        "paths": paths,
    })
}
