// Checks histories of file operations for linearizability with porcupine.
//
// Reads one JSON object for each operation from the files named, groups them by model and key, and prints a
// line for each group. The exit status is 1 when a group is not linearizable, or could not be decided in
// time.
//
// An operation whose outcome nobody knows, because its client was killed, has the outcome "?" and returns at
// the end of time: it may have taken effect at any moment since its call, or never, which is as good as at
// the end.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"sort"
	"strings"
	"time"

	"github.com/anishathalye/porcupine"
)

const limit = 120 * time.Second

const unknown = "?"

type operation struct {
	Model  string `json:"model"`
	Key    string `json:"key"`
	Client int    `json:"client"`
	Call   int64  `json:"call"`
	Return int64  `json:"return"`
	Op     string `json:"op"`
	Value  string `json:"value"`
	Out    string `json:"out"`
}

func model(init string, step func(state string, op operation) (bool, string)) porcupine.Model {
	return porcupine.Model{
		Init: func() interface{} { return init },
		Step: func(state, input, output interface{}) (bool, interface{}) {
			return step(state.(string), input.(operation))
		},
	}
}

var models = map[string]porcupine.Model{
	// A file whose contents are written and read as a whole: in place, or by a rename over its name.
	"register": model("", func(state string, op operation) (bool, string) {
		if op.Op == "write" {
			return true, op.Value
		}
		return op.Out == unknown || op.Out == state, state
	}),
	// A file that only grows.
	"log": model("", func(state string, op operation) (bool, string) {
		if op.Op == "append" {
			return true, state + op.Value
		}
		return op.Out == unknown || op.Out == state, state
	}),
	// A name that is made with O_EXCL and removed.
	"name": model("", func(state string, op operation) (bool, string) {
		switch {
		case op.Op == "create" && op.Out == unknown:
			return true, "there"
		case op.Out == unknown:
			return true, ""
		case op.Op == "create" && state == "":
			return op.Out == "ok", "there"
		case op.Op == "create":
			return op.Out == "exists", state
		case state == "":
			return op.Out == "none", state
		default:
			return op.Out == "ok", ""
		}
	}),
	// A name that is made with O_EXCL, renamed to a second name by whoever comes first, and removed there. The
	// state says which of the two are there.
	"moved": model("", func(state string, op operation) (bool, string) {
		old, new := strings.Contains(state, "o"), strings.Contains(state, "n")
		done := map[string]bool{"create": !old, "move": old, "unlink": new}[op.Op]
		if op.Out != unknown && done != (op.Out == "ok") {
			return false, state
		}
		switch {
		case !done:
			return true, state
		case op.Op == "create":
			return true, "o" + state
		case op.Op == "move":
			return true, "n"
		default:
			return true, strings.TrimSuffix(state, "n")
		}
	}),
	// A lock: tried, waited for, given up by its holder, or lost with the mount of its holder ("gone"), if that
	// had it.
	"lock": model("", func(state string, op operation) (bool, string) {
		owner := fmt.Sprint(op.Client)
		switch {
		case op.Op == "unlock":
			return state == owner, ""
		case op.Op == "gone":
			if state == owner {
				return true, ""
			}
			return true, state
		case op.Out == unknown:
			if state == "" {
				return true, owner
			}
			return true, state
		case op.Out == "ok":
			return state == "", owner
		default:
			return state != "", state
		}
	}),
}

func main() {
	groups := map[string][]porcupine.Operation{}
	for _, path := range os.Args[1:] {
		file, err := os.Open(path)
		if err != nil {
			fail(err)
		}
		lines := bufio.NewScanner(file)
		lines.Buffer(nil, 1<<26)
		for lines.Scan() {
			var op operation
			if err := json.Unmarshal(lines.Bytes(), &op); err != nil {
				fail(err)
			}
			if _, known := models[op.Model]; !known {
				fail(fmt.Errorf("no model %q", op.Model))
			}
			group := op.Model + " " + op.Key
			groups[group] = append(groups[group], porcupine.Operation{
				ClientId: op.Client, Input: op, Call: op.Call, Output: nil, Return: op.Return,
			})
		}
		if err := lines.Err(); err != nil {
			fail(err)
		}
		file.Close()
	}
	names := make([]string, 0, len(groups))
	for name := range groups {
		names = append(names, name)
	}
	sort.Strings(names)
	good := len(names) > 0
	for _, name := range names {
		history := groups[name]
		result := porcupine.CheckOperationsTimeout(models[history[0].Input.(operation).Model], history, limit)
		fmt.Printf("%s: %d operations, %s\n", name, len(history), result)
		good = good && result == porcupine.Ok
	}
	if !good {
		os.Exit(1)
	}
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, err)
	os.Exit(2)
}
