//! The part of Jinja that templates may use: look-ups, calls, filters, includes, and choices between wordings.
//!
//! What computes or repeats is refused before the template is compiled: minijinja computes constants while it compiles,
//! and a value that is joined to itself some forty times fills any memory.

use anyhow::{Result, bail, ensure};
use minijinja::machinery::ast::{BinOpKind, CallArg, Expr, Stmt, UnaryOpKind};
use minijinja::machinery::{Token, parse, tokenize};

/// The most words and signs of a tag. minijinja takes each link of a chain of operators, filters or attributes down the
/// stack, whose end would end the program.
const MOST_TOKENS: usize = 200;

/// Refuses what `text` uses of Jinja beside that part; messages call it `origin`. A syntax error is left to the compiler.
pub fn require_part(origin: &str, text: &str) -> Result<()> {
    let mut count = 0;
    for (token, span) in tokenize(text, false, Default::default()).map_while(Result::ok) {
        count = if matches!(token, Token::VariableEnd | Token::BlockEnd) { 0 } else { count + 1 };
        let line = span.start_line;
        ensure!(count <= MOST_TOKENS, "{origin}:{line}: a tag has more than {MOST_TOKENS} words and signs; shorten it");
    }
    match parse(text, origin, Default::default()) {
        Ok(template) => statement(origin, &template),
        Err(_) => Ok(()),
    }
}

fn statement(origin: &str, statement: &Stmt) -> Result<()> {
    let all = |list: &[Stmt]| list.iter().try_for_each(|inner| self::statement(origin, inner));
    let (line, what) = match statement {
        Stmt::Template(template) => return all(&template.children),
        Stmt::EmitRaw(_) => return Ok(()),
        Stmt::EmitExpr(emit) => return expression(origin, &emit.expr),
        Stmt::Include(include) => return expression(origin, &include.name),
        Stmt::IfCond(choice) => {
            expression(origin, &choice.expr)?;
            return all(&choice.true_body).and_then(|()| all(&choice.false_body));
        }
        Stmt::ForLoop(s) => (s.span().start_line, "for"),
        Stmt::WithBlock(s) => (s.span().start_line, "with"),
        Stmt::Set(s) => (s.span().start_line, "set"),
        Stmt::SetBlock(s) => (s.span().start_line, "set"),
        Stmt::AutoEscape(s) => (s.span().start_line, "autoescape"),
        Stmt::FilterBlock(s) => (s.span().start_line, "filter"),
        Stmt::Block(s) => (s.span().start_line, "block"),
        Stmt::Import(s) => (s.span().start_line, "import"),
        Stmt::FromImport(s) => (s.span().start_line, "from"),
        Stmt::Extends(s) => (s.span().start_line, "extends"),
        Stmt::Macro(s) => (s.span().start_line, "macro"),
        Stmt::CallBlock(s) => (s.span().start_line, "call"),
        Stmt::Do(s) => (s.span().start_line, "do"),
    };
    refuse(origin, line, &format!("{{% {what} %}}"))
}

fn expression(origin: &str, expression: &Expr) -> Result<()> {
    let inner = |inner: &Expr| self::expression(origin, inner);
    let argument = |argument: &CallArg| match argument {
        CallArg::Pos(value) | CallArg::Kwarg(_, value) => inner(value),
        CallArg::PosSplat(value) | CallArg::KwargSplat(value) => refuse(origin, value.span().start_line, "*"),
    };
    let what = match expression {
        Expr::Var(_) | Expr::Const(_) => return Ok(()),
        Expr::GetAttr(of) => return inner(&of.expr),
        Expr::Compare(comparison) => {
            inner(&comparison.expr)?;
            return comparison.ops.iter().try_for_each(|operation| inner(&operation.expr));
        }
        Expr::Call(call) => {
            inner(&call.expr)?;
            return call.args.iter().try_for_each(argument);
        }
        Expr::Filter(filter) => {
            filter.expr.iter().try_for_each(inner)?;
            return filter.args.iter().try_for_each(argument);
        }
        Expr::UnaryOp(of) if matches!(of.op, UnaryOpKind::Not) => return inner(&of.expr),
        Expr::BinOp(of) if chooses(of.op) => {
            return inner(&of.left).and_then(|()| inner(&of.right));
        }
        Expr::UnaryOp(_) | Expr::BinOp(_) => "an operator that computes",
        Expr::IfExpr(_) => "an if in an expression",
        other => other.description(),
    };
    refuse(origin, expression.span().start_line, what)
}

/// Comparisons, and what joins them.
fn chooses(operator: BinOpKind) -> bool {
    use BinOpKind::{Eq, Gt, Gte, Lt, Lte, Ne, ScAnd, ScOr};
    matches!(operator, ScAnd | ScOr | Eq | Ne | Lt | Lte | Gt | Gte)
}

fn refuse(origin: &str, line: u16, what: &str) -> Result<()> {
    bail!("{origin}:{line}: a template cannot use {what}; compute it in the problem's answer.rs")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn look_ups_and_choices_are_allowed() {
        let text = "{% include \"a\" %}{% if not claim(\"x\") and answer.a == 1 %}{{ answer.b | ms(1) }}{% else %}{{ f(a, b=\"c\") }}{% endif %}\
                    {# a comment #}{% raw %}{% set x = 1 %}{% endraw %}";
        require_part("x", text).unwrap();
        require_part("x", "{% if %}").unwrap();
    }

    #[test]
    fn what_computes_or_repeats_is_named_with_its_line() {
        for (text, named) in [
            ("{% for i in a %}{% endfor %}", "{% for %}"),
            ("{% set a = b %}", "{% set %}"),
            ("{% set a %}{% endset %}", "{% set %}"),
            ("{% with a = b %}{% endwith %}", "{% with %}"),
            ("{% filter join %}{% endfilter %}", "{% filter %}"),
            ("{% macro a() %}{% endmacro %}", "{% macro %}"),
            ("{% call a() %}{% endcall %}", "{% call %}"),
            ("{% do a() %}", "{% do %}"),
            ("{% block a %}{% endblock %}", "{% block %}"),
            ("{% extends \"a\" %}", "{% extends %}"),
            ("{% import \"a\" as b %}", "{% import %}"),
            ("{% from \"a\" import b %}", "{% from %}"),
            ("{% autoescape true %}{% endautoescape %}", "{% autoescape %}"),
            ("{{ a ~ a }}", "an operator that computes"),
            ("{{ \"a\" * 9 }}", "an operator that computes"),
            ("{{ f(a + 1) }}", "an operator that computes"),
            ("{{ a | join(b ~ c) }}", "an operator that computes"),
            ("{% if a == b * 2 %}{% endif %}", "an operator that computes"),
            ("{% if a %}{% elif -a %}{% endif %}", "an operator that computes"),
            ("{{ [a, a] }}", "list literal"),
            ("{{ {\"a\": a} }}", "map literal"),
            ("{{ (a, a) }}", "tuple literal"),
            ("{{ a[1:] }}", "expression"),
            ("{{ a if b else c }}", "an if in an expression"),
            ("{{ a is defined }}", "test expression"),
            ("{{ f(*a) }}", "*"),
        ] {
            let error =
                require_part("templates/x.md", &format!("one\ntwo {text}")).err().map(|error| error.to_string());
            let expected = format!("templates/x.md:2: a template cannot use {named};");
            assert!(error.as_ref().is_some_and(|error| error.starts_with(&expected)), "{text} gave {error:?}");
        }
    }
}
